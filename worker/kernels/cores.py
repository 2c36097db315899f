"""Attention on gathered pages: two cores that compute the same thing, and the choice between them.

`reference` is plain PyTorch in float32, works on any device and knows soft-capping. `fused` is PyTorch's own flash
attention for the CPU, several times faster. Both get a token's keys in one shape that depends on its position alone
(see `worker.kernels.plan`), so what is left to ask of them is that the matrices of a batch and the rows of a matrix are
treated alike, and that narrow tiles give the bits of wide ones. `choose` measures that.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from worker.kernels import probe
from worker.kernels.plan import KEY_TILE, Heads, TileBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TileBatch, float, float], torch.Tensor]

log = logging.getLogger(__name__)

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
    trials = [_Trial(spec, dtype, wide, tiles, zero) for tiles in (1, 4, 6) for zero in ("values", "scores")]
    for core, name in cores:
        for narrow in _widths(spec, wide):
            if all(trial.agrees(core, narrow) for trial in trials):
                return Method(core, name, heads._replace(narrow=narrow))
    core, name = cores[0]
    log.warning("attention with heads of %d in %s: a row's bits depend on its batch here", spec.head_size, dtype)
    return Method(core, name, heads)


def _widths(spec: LayerSpec, wide: int) -> list[int]:
    """Powers of two to try, narrowest first. Never a single row: a vector times a matrix is another routine."""
    widths = [1 << shift for shift in range(wide.bit_length())]
    return [width for width in widths if width * spec.group > 1 or width == wide]


class _Trial:
    """Attention over a number of keys where either the scores or the weighted values add up to zero.

    Two sequences and one head: more of either are more matrices in a batch.
    """

    def __init__(self, spec: LayerSpec, dtype: torch.dtype, wide: int, key_tiles: int, zero: str) -> None:
        self.spec, self.dtype, self.wide = spec, dtype, wide
        self.keys = key_tiles * KEY_TILE
        self.shown = self.keys - 22
        generator = torch.Generator().manual_seed(self.keys)

        def draw(rows: int) -> torch.Tensor:
            return probe.spread(generator, 2, 1, rows, spec.head_size)

        query, key, value = draw(wide * spec.group), draw(self.keys), draw(self.keys)
        if zero == "values":
            halves = probe.pairs(generator, self.shown)
            key[:, :, : self.shown] = probe.same(key[:, :, : self.shown], halves, 2)
            value[:, :, : self.shown] = probe.same(value[:, :, : self.shown], halves, 2, -1)
            self.scaling = 1 / float(query.square().sum(-1).max() * key.square().sum(-1).max()) ** 0.5
        else:
            halves = probe.pairs(generator, spec.head_size)
            query, key = probe.same(query, halves, 3), probe.same(key, halves, 3, -1)
            self.scaling = 2.0**16
        self.given = (query.to(dtype), key.to(dtype), value.to(dtype))

    def agrees(self, core: Core, width: int) -> bool:
        """Whether tiles of ``width`` give the bits of wide ones: together, fewer of them, and at other places."""
        query, key, value = self.given
        expected = self._run(core, self.wide, query, key, value)
        moved = 3 * self.spec.group
        shifted = self._run(core, width, query.roll(moved, 2), key, value).roll(-moved, 2)
        fewer = self._run(core, width, query[1:2], key[1:2], value[1:2])
        return (
            torch.equal(self._run(core, width, query, key, value), expected)
            and torch.equal(shifted, expected)
            and torch.equal(fewer, expected[1:2])
        )

    def _run(self, core: Core, width: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All rows of ``query``, cut into tiles of ``width`` positions."""
        cuts, rows = self.wide // width, width * self.spec.group
        count = len(query) * cuts
        parts = query.view(len(query), 1, cuts, rows, -1).transpose(1, 2)
        visible = (torch.arange(self.keys) < self.shown).expand(count, 1, rows, self.keys)
        bias = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, -torch.inf)
        none = torch.empty(0, dtype=torch.int64)
        batch = TileBatch(count, width, self.keys, none, none, visible, bias)
        queries = parts.reshape(count, *parts.shape[2:])
        keys, values = (given.repeat_interleave(cuts, 0) for given in (key, value))
        result = core(queries, keys, values, batch, self.scaling, self.spec.softcap)
        return result.reshape(parts.shape).transpose(1, 2).reshape(query.shape)
