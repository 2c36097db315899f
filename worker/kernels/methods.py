"""How the layers of a model attend on this machine: the core and the widths of tiles that keep a token's bits.

Measured, like products (`worker.kernels.products`): on made-up sequences, for the layer's own heads and type, under
the present number of threads. The fastest core is taken whose rows have the same bits in any batch, alone, at any place
in their tile, and in narrow tiles as in wide ones; first on whole tiles, then, where none does that, in pieces of few
rows. Each is tried with all keys in sight: a masked key adds nothing, so the order of what is added would not show.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from worker.kernels import probe
from worker.kernels.cores import fused, in_pieces, never_alone, reference
from worker.kernels.plan import KEY_TILE, Heads, TileBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worker.kernels.cores import Core, LayerSpec

    Named = tuple[str, Core]

log = logging.getLogger(__name__)

_WIDE_ROWS = 160
"""Rows (positions times grouped heads) in a wide tile, at most."""

_WIDE_ROWS_OF_MANY_THREADS = 63
"""The same with more than `_FEW_THREADS` threads: with them, the flash attention of torch 2.13 reorders keys for tiles
of 64 rows and more in small batches only."""

_FEW_THREADS = 16

_NARROW = 4
"""A core on whole tiles has to do with tiles this much narrower than wide ones; else it is tried in pieces first."""

_PIECES = (24, 12, 4)
"""Rows in a piece, largest first."""

_KEY_TILES = (1, 2, 3, 4, 6)
"""Numbers of keys to try. Of more, both cores multiply as many at a time as of these."""

_HIDDEN = 22
"""Keys that are masked in the largest trial. In the others all are seen: what is added last must count too."""


@dataclass(frozen=True, slots=True)
class Method:
    """How a layer attends on this machine."""

    core: Core
    name: str
    heads: Heads
    exact: bool = False
    """Whether a token's bits really do not depend on its batch."""
    digest: str = ""
    """Of what the core makes of the trials: machines and numbers of threads with other bits have another."""


def choose(spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> Method:
    """The method for layers like ``spec``, for the present number of threads. Nothing is measured beside the CPU."""
    return _choose(spec, dtype, device, torch.get_num_threads())


@lru_cache(maxsize=256)
def _choose(spec: LayerSpec, dtype: torch.dtype, device: torch.device, threads: int) -> Method:
    heads = Heads(spec.kv_heads, spec.group, spec.window, _widest(spec.group, threads), 1)
    if device.type != "cpu":
        return Method(reference, "reference", heads)
    cores: list[Named] = [("reference", reference)]
    if not spec.softcap and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        cores.insert(0, ("fused", fused))
    return measure(cores, spec, heads, dtype)


def measure(cores: Sequence[Named], spec: LayerSpec, heads: Heads, dtype: torch.dtype) -> Method:
    """The first of ``cores`` that keeps its bits, on whole tiles or in pieces, with the narrowest tile that can be."""
    trials = [_Trial(spec, dtype, heads.wide, tiles, zero) for tiles in _KEY_TILES for zero in ("values", "scores")]
    safe = [(name, never_alone(core)) for name, core in cores]
    for name, core, widths in _candidates(safe, trials, spec.group, heads.wide):
        for narrow in widths:
            if all(trial.agrees(core, narrow) for trial in trials):
                digest = probe.digest(trial.wide_result(core) for trial in trials)
                return Method(core, name, heads._replace(narrow=narrow), exact=True, digest=digest)
    name, core = safe[0]
    log.warning("attention with heads of %d in %s: a token's bits depend on its batch here", spec.head_size, dtype)
    return Method(core, name, heads, digest=probe.digest(trial.wide_result(core) for trial in trials))


def _candidates(
    cores: Sequence[Named], trials: Sequence[_Trial], group: int, wide: int
) -> Iterator[tuple[str, Core, list[int]]]:
    """What to try, best first, and in which narrow tiles; the pieces are made when it comes to them."""
    widths = _widths(group, wide)
    few = [width for width in widths if width <= max(1, wide // _NARROW)]
    yield from ((name, core, few) for name, core in cores)
    yield from ((name, core, widths) for name, core in _in_pieces(cores, trials, _PIECES[-1]))
    yield from ((name, core, widths) for name, core in cores)
    yield from ((name, core, widths) for name, core in _in_pieces(cores, trials, 1))


def _in_pieces(cores: Sequence[Named], trials: Sequence[_Trial], smallest: int) -> Iterator[Named]:
    """The cores in pieces of so many rows; also in larger ones, where they agree."""
    for name, core in cores:
        sizes: tuple[int, ...] = (smallest,)
        for size in reversed([size for size in _PIECES if size > smallest]):
            base, larger = in_pieces(core, (smallest,)), in_pieces(core, (size, *sizes))
            if all(torch.equal(trial.wide_result(larger), trial.wide_result(base)) for trial in trials):
                sizes = (size, *sizes)
        yield f"{name} by {'/'.join(map(str, sizes))} rows", in_pieces(core, sizes)


def _widest(group: int, threads: int) -> int:
    most = _WIDE_ROWS if threads <= _FEW_THREADS else _WIDE_ROWS_OF_MANY_THREADS
    wide = 32
    while wide > 1 and wide * group > most:
        wide //= 2
    return wide


def _widths(group: int, wide: int) -> list[int]:
    """Powers of two to try, narrowest first. Never a single row: a vector times a matrix is another routine."""
    widths = [1 << shift for shift in range(wide.bit_length())]
    return [width for width in widths if width * group > 1 or width == wide]


class _Trial:
    """Attention over a number of keys where either the scores or the weighted values add up to zero.

    Two sequences and one head: more of either are more matrices in a batch.
    """

    def __init__(self, spec: LayerSpec, dtype: torch.dtype, wide: int, key_tiles: int, zero: str) -> None:
        self.spec, self.dtype, self.wide = spec, dtype, wide
        self.keys = key_tiles * KEY_TILE
        self.shown = self.keys - (_HIDDEN if key_tiles == _KEY_TILES[-1] else 0)
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

    def wide_result(self, core: Core) -> torch.Tensor:
        """Of wide tiles, both in one batch."""
        return self._run(core, self.wide, *self.given)

    def agrees(self, core: Core, width: int) -> bool:
        """Whether tiles of ``width`` give the bits of wide ones: together, fewer, alone, and at other places."""
        query, key, value = self.given
        expected = self.wide_result(core)
        moved, rows = 3 * self.spec.group, width * self.spec.group
        shifted = self._run(core, width, query.roll(moved, 2), key, value).roll(-moved, 2)
        return (
            torch.equal(self._run(core, width, query, key, value), expected)
            and torch.equal(shifted, expected)
            and torch.equal(self._run(core, width, query[1:], key[1:], value[1:]), expected[1:])
            and all(
                torch.equal(self._run(core, width, query[:1, :, part], key[:1], value[:1]), expected[:1, :, part])
                for part in (slice(rows), slice(query.shape[2] - rows, None))
            )
        )

    def _run(self, core: Core, width: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All rows of ``query``, cut into tiles of ``width`` positions."""
        rows = width * self.spec.group
        tiles = query.shape[2] // rows
        count = len(query) * tiles
        parts = query.reshape(len(query), 1, tiles, rows, -1).transpose(1, 2)
        visible = (torch.arange(self.keys) < self.shown).expand(count, 1, rows, self.keys)
        bias = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, -torch.inf)
        none = torch.empty(0, dtype=torch.int64)
        batch = TileBatch(count, width, self.keys, none, none, visible, bias)
        queries = parts.reshape(count, *parts.shape[2:])
        keys, values = (given.repeat_interleave(tiles, 0) for given in (key, value))
        result = core(queries, keys, values, batch, self.scaling, self.spec.softcap)
        return result.reshape(parts.shape).transpose(1, 2).reshape(query.shape)
