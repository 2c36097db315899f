"""Attention over pages: writes a step's keys and values, then reads all a token may see through its block table.

This path runs everywhere, in plain PyTorch. What multiplies the gathered pages is in `worker.kernels.cores`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.kernels.methods import choose
from worker.kernels.plan import PoolShape, StepPlan, TileBatch
from worker.kernels.products import TILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.kernels.cores import Core, LayerSpec
    from worker.step import StepRow

WORKSPACE_BYTES = 64 << 20
"""Space for gathered pages. A batch that needs more runs in pieces; at least one tile always runs."""

_COPIED_AT_A_TIME = 64
"""Blocks, so that the space for them stays bounded."""


class PagedAttention:
    """The pages of all layers, and attention over them.

    Args:
        layers: one per attention layer, in order.
        pool: number and size of blocks.
        dtype: float32 or bfloat16.
        device: of the pages.
        tiles: numbers of rows that the model's products run at a time, largest first.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        pool: PoolShape,
        dtype: torch.dtype,
        device: torch.device,
        tiles: tuple[int, ...] = TILES,
    ) -> None:
        if pool.block_size < 1 or pool.block_size & (pool.block_size - 1):
            raise ValueError(f"block size {pool.block_size} is not a power of two")
        self.layers = tuple(layers)
        self.pool = pool
        self.dtype = dtype
        self.device = device
        self.tiles = tiles
        chosen = {spec: choose(spec, dtype, device) for spec in dict.fromkeys(layers)}
        self.methods = tuple(chosen[spec] for spec in layers)
        self.pages, self._pools = self._allocate()
        self._workspace = torch.empty(0, dtype=dtype, device=device)

    def plan(self, rows: Sequence[StepRow]) -> StepPlan:
        """The plan of a step; ``rows`` must not be empty."""
        widest = max(2 * spec.kv_heads * spec.head_size for spec in self.layers) * self.dtype.itemsize
        return StepPlan(rows, self.pool, self.dtype, self.device, WORKSPACE_BYTES // widest, self.tiles)

    def begin(self, plan: StepPlan) -> None:
        """To be called before the layers of a step: clears the blocks that it begins.

        What a block held before must not meet a masked score: -inf added to NaN is NaN, and so is 0 times NaN.
        """
        if plan.fresh_blocks is not None:
            for pool in self._pools:
                pool.index_fill_(1, plan.fresh_blocks, 0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks of all layers, ``(from, to)`` each. No block is both copied from and copied to."""
        for start in range(0, len(pairs), _COPIED_AT_A_TIME):
            some = torch.tensor(pairs[start : start + _COPIED_AT_A_TIME], dtype=torch.int64, device=self.device)
            source, target = some.unbind(1)
            for pool in self._pools:
                pool.index_copy_(1, target, pool.index_select(1, source))

    @property
    def page_bytes(self) -> int:
        """Of a block, in all layers."""
        return sum(pool[:, 0].numel() * pool.itemsize for pool in self._pools)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """What these blocks hold: pool by pool, layer by layer."""
        # Numbers of sixteen bits have no counterpart in numpy, so bytes it is.
        return [
            b"".join(pool[:, block].contiguous().view(torch.uint8).cpu().numpy().tobytes() for pool in self._pools)
            for block in blocks
        ]

    def write_blocks(self, blocks: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        """Makes these blocks hold that. ValueError for a payload of another size than ``page_bytes``."""
        if any(len(payload) != self.page_bytes for payload in payloads):
            raise ValueError(f"a page of this model has {self.page_bytes} bytes")
        for block, payload in zip(blocks, payloads, strict=True):
            numbers = torch.frombuffer(bytearray(payload), dtype=self.dtype)
            for pool in self._pools:
                place = pool[:, block]
                place.copy_(numbers[: place.numel()].view(place.shape))
                numbers = numbers[place.numel() :]

    def damaged(self, plan: StepPlan) -> list[int]:
        """The rows of a step that left a key or value in their pages, in any layer, that is not finite.

        To be asked when all layers are done. What is not finite in one token can reach those before it in the same
        tile, through masked scores, and so their keys and values in later layers.
        """
        found: set[int] = set()
        heads = {pages.shape: method.heads for pages, method in zip(self.pages, self.methods, strict=True)}
        for pool in self._pools:
            kv_heads, size = pool.shape[2] // 2, pool.shape[-1]
            indices = plan.layer(heads[pool.shape[1:]])
            rows = torch.cat((indices.key_rows, indices.value_rows))
            written = pool.view(len(pool), -1, size).index_select(1, rows)
            if not written.sum().isfinite():
                sound = written.isfinite().all(-1).all(0).view(2, plan.tokens, kv_heads)
                found.update(plan.owners(~sound.all(-1).all(0)))
        return sorted(found)

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
        """``[tiles * kv_heads * width * group, head_size]``."""
        size, rows = spec.head_size, batch.width * spec.group
        query = queries.index_select(0, batch.queries).view(batch.tiles, spec.kv_heads, rows, size)
        run = pages.view(-1, self.pool.block_size * size)
        space = self._space(len(batch.pages) * run.shape[1]).view(-1, run.shape[1])
        gathered = torch.index_select(run, 0, batch.pages, out=space)
        key, value = gathered.view(2, batch.tiles, spec.kv_heads, batch.keys, size)
        return core(query, key, value, batch, spec.scaling, spec.softcap).reshape(-1, size)

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
