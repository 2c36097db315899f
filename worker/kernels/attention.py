"""Attention over pages: writes a step's keys and values, then reads all a token may see through its block table.

Two cores compute the same thing on gathered pages. `reference` is plain PyTorch in float32, works on any device and
knows soft-capping. `fused` is PyTorch's own flash attention for the CPU, several times faster. Both get each token's
keys in one shape that depends on its position alone (see `worker.kernels.plan`), so what is left to ask of them is
that the rows of a matrix and the matrices of a batch are treated alike. `choose` measures that, as for the products.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from worker.kernels.plan import KEY_TILE, Heads, PoolShape, StepPlan, TileBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.step import StepRow

    Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TileBatch, float, float], torch.Tensor]

log = logging.getLogger(__name__)

WORKSPACE_BYTES = 64 << 20
"""Space for gathered pages. A batch that needs more runs in pieces; at least one tile always runs."""

_WIDE_ROWS = 160
"""Rows (positions times grouped heads) in a wide tile, at most."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer of a model is like."""

    heads: int
    kv_heads: int
    head_size: int
    scaling: float
    window: int = 0
    """Keys that a token sees, itself included; 0: all before it."""
    softcap: float = 0.0
    """Scores become ``softcap * tanh(scores / softcap)``; 0: they stay."""

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Method:
    """How a layer attends on this machine."""

    core: Core
    name: str
    heads: Heads


class PagedAttention:
    """The pages of all layers, and attention over them.

    Args:
        layers: one per attention layer, in order.
        pool: number and size of blocks.
        dtype: float32 or bfloat16.
        device: of the pages.
    """

    def __init__(self, layers: Sequence[LayerSpec], pool: PoolShape, dtype: torch.dtype, device: torch.device) -> None:
        if pool.block_size < 1 or pool.block_size & (pool.block_size - 1):
            raise ValueError(f"block size {pool.block_size} is not a power of two")
        self.layers = tuple(layers)
        self.pool = pool
        self.dtype = dtype
        self.device = device
        chosen = {spec: choose(spec, dtype, device) for spec in dict.fromkeys(layers)}
        self.methods = tuple(chosen[spec] for spec in layers)
        self.pages, self._pools = self._allocate()
        self._workspace = torch.empty(0, dtype=dtype, device=device)

    def plan(self, rows: Sequence[StepRow]) -> StepPlan:
        """The plan of a step; ``rows`` must not be empty."""
        widest = max(2 * spec.kv_heads * spec.head_size for spec in self.layers) * self.dtype.itemsize
        return StepPlan(rows, self.pool, self.dtype, self.device, WORKSPACE_BYTES // widest)

    def begin(self, plan: StepPlan) -> None:
        """To be called before the layers of a step: clears the blocks that it begins.

        What a block held before must not meet a masked score: -inf added to NaN is NaN, and so is 0 times NaN.
        """
        if plan.fresh_blocks is not None:
            for pool in self._pools:
                pool.index_fill_(1, plan.fresh_blocks, 0)

    def attend(
        self, layer: int, plan: StepPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Writes ``key`` and ``value`` ``[1, kv_heads, tokens, head_size]`` to their pages, then attends.

        ``query`` is ``[1, heads, tokens, head_size]``; the result is ``[1, tokens, heads, head_size]``. Rows of padding
        tokens hold something finite.
        """
        spec, method, pages = self.layers[layer], self.methods[layer], self.pages[layer]
        size = spec.head_size
        indices = plan.layer(method.heads)
        slots = pages.view(-1, size)
        slots.index_copy_(0, indices.key_rows, key.transpose(1, 2).reshape(-1, size))
        slots.index_copy_(0, indices.value_rows, value.transpose(1, 2).reshape(-1, size))
        queries = query.transpose(1, 2).reshape(-1, spec.group * size)
        results = [self._batch(spec, method.core, pages, queries, batch) for batch in indices.batches]
        joined = results[0] if len(results) == 1 else torch.cat(results)
        return joined.index_select(0, indices.result_rows).view(1, plan.tokens, spec.heads, size)

    def _batch(
        self, spec: LayerSpec, core: Core, pages: torch.Tensor, queries: torch.Tensor, batch: TileBatch
    ) -> torch.Tensor:
        """``[tiles * width * group * kv_heads, head_size]``."""
        size, rows = spec.head_size, batch.width * spec.group
        query = queries.index_select(0, batch.queries).view(batch.tiles, spec.kv_heads, rows, size)
        run = pages.view(-1, self.pool.block_size * size)
        space = self._space(len(batch.pages) * run.shape[1]).view(-1, run.shape[1])
        gathered = torch.index_select(run, 0, batch.pages, out=space)
        key, value = gathered.view(2, batch.tiles, spec.kv_heads, batch.keys, size)
        result = core(query, key, value, batch, spec.scaling, spec.softcap)
        return result.transpose(1, 2).reshape(-1, size)

    def _space(self, count: int) -> torch.Tensor:
        """``count`` elements for gathered pages. Kept: fresh memory costs as much again as the copy into it."""
        if self._workspace.numel() < count:
            self._workspace = torch.empty(count, dtype=self.dtype, device=self.device)
        return self._workspace[:count]

    def _allocate(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Pages per layer, and the tensors that hold them: one per shape, so that clearing blocks is one call."""
        shapes = [(spec.kv_heads, spec.head_size) for spec in self.layers]
        blocks, size = self.pool.num_blocks + 2, self.pool.block_size

        def pool(kv_heads: int, head_size: int) -> torch.Tensor:
            count = shapes.count((kv_heads, head_size))
            return torch.zeros(count, blocks, 2 * kv_heads, size, head_size, dtype=self.dtype, device=self.device)

        pools = {shape: pool(*shape) for shape in dict.fromkeys(shapes)}
        unused = {shape: iter(pool) for shape, pool in pools.items()}
        return tuple(next(unused[shape]) for shape in shapes), tuple(pools.values())


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: TileBatch, scaling: float, softcap: float
) -> torch.Tensor:
    """Attention in float32: ``query`` ``[n, h, rows, d]``, ``key`` and ``value`` ``[n, h, keys, d]`` -> like query.

    What no row of a tile may see does not reach the result, NaN included.
    """
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(~batch.visible, -torch.inf), dim=-1)
    seen = batch.visible.any(dim=-2).unsqueeze(-1)
    return torch.matmul(weights, value.float().masked_fill(~seen, 0.0)).to(query.dtype)


def fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: TileBatch, scaling: float, softcap: float
) -> torch.Tensor:
    """The same in one call, on the CPU and without soft-capping. Every gathered key and value must be finite."""
    assert not softcap
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return cast("torch.Tensor", flash(query, key, value, attn_mask=batch.bias, scale=scaling)[0])


def choose(spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> Method:
    """The fastest core whose rows keep their bits here, with the narrowest tile that agrees with the wide one."""
    wide = 32
    while wide > 1 and wide * spec.group > _WIDE_ROWS:
        wide //= 2
    heads = Heads(spec.kv_heads, spec.group, spec.window, wide, 1)
    if device.type != "cpu":
        return Method(reference, "reference", heads)
    cores: list[tuple[Core, str]] = [(reference, "reference")]
    if not spec.softcap and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        cores.insert(0, (fused, "fused"))
    for core, name in cores:
        narrow = _narrowest(core, spec, dtype, wide)
        if narrow:
            return Method(core, name, heads._replace(narrow=narrow))
    core, name = cores[0]
    log.warning("attention with heads of %d in %s: a row's bits depend on its batch here", spec.head_size, dtype)
    return Method(core, name, heads)


def _narrowest(core: Core, spec: LayerSpec, dtype: torch.dtype, wide: int) -> int:
    """The smallest width, a power of two, that gives the bits of ``wide`` at any place; 0 if not even itself does."""
    width = 1
    while width <= wide:
        if all(_agrees(core, spec, dtype, wide, width, keys) for keys in (KEY_TILE, 4 * KEY_TILE, 6 * KEY_TILE)):
            return width
        width *= 2
    return 0


def _agrees(core: Core, spec: LayerSpec, dtype: torch.dtype, wide: int, width: int, keys: int) -> bool:
    generator = torch.Generator().manual_seed(keys)

    def random(tiles: int, rows: int) -> torch.Tensor:
        return torch.randn(tiles, spec.kv_heads, rows, spec.head_size, generator=generator).to(dtype)

    def run(query: torch.Tensor, tiles: int) -> torch.Tensor:
        """The result in the last of ``tiles`` matrices; the others hold something else."""
        shape = (tiles, 1, query.shape[2], keys)
        visible = (torch.arange(keys) < keys - 21).expand(shape)
        bias = torch.zeros(shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
        empty = torch.empty(0, dtype=torch.int64)
        batch = TileBatch(tiles, query.shape[2], keys, empty, empty, visible, bias)
        parts = [torch.cat((random(tiles - 1, given.shape[2]), given)) for given in (query, key, value)]
        return core(parts[0], parts[1], parts[2], batch, spec.scaling, spec.softcap)[-1:]

    query, key, value = random(1, wide * spec.group), random(1, keys), random(1, keys)
    expected = run(query, 1)
    rows = width * spec.group
    return all(
        torch.equal(run(query[:, :, at : at + rows], tiles), expected[:, :, at : at + rows])
        for tiles in (1, 3)
        for at in {0, rows % (wide * spec.group), (wide * spec.group - rows) // 2, wide * spec.group - rows}
        if at + rows <= wide * spec.group
    ) and (width < wide or torch.equal(run(query.roll(3, 2), 3), expected.roll(3, 2)))
