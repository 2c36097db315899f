"""Ways to multiply by a weight, and the choice of one whose bits for a row don't depend on the rows beside it.

A BLAS library picks its blocking by the number of rows, and with it the order in which a row's products are added: the
same row comes out with other bits in a batch of 7 than in a batch of 300, and on some machines with other bits at the
end of a batch than at its beginning. So products only ever see a few fixed numbers of rows, the *tiles*. Which of them
agree, bit for bit and at any place in the tile, differs between machines, libraries, types, shapes and numbers of
threads. It is measured here, for the shape at hand, and the first of these forms that keeps its bits is used:

==========  ============================================================================================
`packed`    bfloat16, the weight reordered once for oneDNN with a hint of one row: the fastest where the
            processor multiplies bfloat16, and the one whose bits are the same in the most tiles
`widened`   bfloat16 as float32: the weight is kept in float32, twice as large. Where the processor does not
            multiply bfloat16, the libraries' own bfloat16 products take 3 to 8 times as long as this
`padded`    as float32 too, each row filled up with zeros to a multiple of 64 bytes: some kernels add a row in another
            order where it begins at another place within a register's width (seen with 33 inputs, MKL on AVX2)
`plain`     torch's own product
==========  ============================================================================================

Each is tried with tiles of 16 rows and more, then of 8 and of 4; if nothing keeps its bits, single rows are multiplied
one by one. Where even these depend on their place, the first form serves, no promise holds, and the log says so. That
has not been seen with these forms. A row that is not a number must not touch the others' bits either.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from worker.kernels import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Product = Callable[[torch.Tensor], torch.Tensor]
    Form = Callable[[torch.Tensor, torch.Tensor | None], Product]

log = logging.getLogger(__name__)

BASE_TILE = 16
"""The smallest tile of nearly every machine, in rows. A runner pads its rows to a multiple of it, once for a model."""

TILES = (512, 256, 128, 64, 32, BASE_TILE)
"""Tiles to try, largest first."""

_HEAD_ROWS = 128
"""Larger tiles are not tried for weights with as many outputs as a head has: few rows get so far."""

_HEAD_OUTPUTS = 1 << 14

_NARROW = (8, 4)
"""Smaller ones, tried where `BASE_TILE` does not keep its bits."""

_REGISTER_INPUTS = 16
"""float32 numbers in 64 bytes."""

_DRAWN_OUTPUTS = 1024
"""Outputs for which a weight is drawn; more repeat these. Each output is a sum of its own."""

_TIMED_ROWS = 64

_BROKEN = 8
"""Of so many rows of a trial, one is NaN: where the width is no multiple of what a register holds, some kernels
multiply the beginning of the next row by zeros, which does no harm until it is not a number."""

_SMALL = 1 << 21
"""Weights of at most so many numbers are tried with ordinary data too."""


class Recipe(NamedTuple):
    """How to multiply by weights of one shape and type on this machine."""

    form: str
    tiles: tuple[int, ...]
    """Numbers of rows that give a row the same bits, largest first."""
    exact: bool
    """Whether a row's bits really do not depend on its neighbours."""
    digest: str
    """Of what this form makes of the probe's data: machines and numbers of threads with other bits have another."""
    seconds: float
    """That 64 rows took."""
    plain_seconds: float
    """That torch's own product took for them, all together."""


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """See the module. ``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]``, bfloat16."""
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: cast("torch.Tensor", multiply(x, reordered, bias, "none", [], ""))


def widened(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """See the module. The bias is added before the result is rounded."""
    wide, wide_bias = weight.detach().float(), None if bias is None else bias.float()
    return lambda x: F.linear(x.float(), wide, wide_bias).to(x.dtype)


def padded(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """See the module."""
    missing = -weight.shape[1] % _REGISTER_INPUTS
    wide, wide_bias = F.pad(weight.detach().float(), (0, missing)), None if bias is None else bias.float()
    return lambda x: F.linear(F.pad(x.float(), (0, missing)), wide, wide_bias).to(x.dtype)


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """See the module."""
    kept = weight.detach().contiguous()
    return lambda x: F.linear(x, kept, bias)


FORMS: Mapping[str, Form] = {"packed": packed, "widened": widened, "padded": padded, "plain": plain}


def ladder(dtype: torch.dtype, *, lean: bool = False) -> dict[str, Form]:
    """The forms to try for weights of ``dtype`` on this processor, in order. Lean ones keep no copy of the weight."""
    if lean:
        names = ["plain"]
    elif dtype == torch.bfloat16:
        names = ["packed", "plain", "widened"] if multiplies_bfloat16() else ["widened", "padded", "plain"]
    else:
        names = ["plain", "padded"]
    return {name: FORMS[name] for name in names}


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for it that this build of PyTorch uses."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(native and torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose(shape: tuple[int, int], dtype: torch.dtype, *, bias: bool, lean: bool = False) -> Recipe:
    """The recipe for weights of ``shape`` ``(out_features, in_features)``, for the present number of threads."""
    return _choose(shape, dtype, bias, lean, torch.get_num_threads())


@lru_cache(maxsize=1024)
def _choose(shape: tuple[int, int], dtype: torch.dtype, bias: bool, lean: bool, threads: int) -> Recipe:
    return measure(ladder(dtype, lean=lean), shape, dtype, bias=bias)


def measure(forms: Mapping[str, Form], shape: tuple[int, int], dtype: torch.dtype, *, bias: bool) -> Recipe:
    """The first of ``forms`` that keeps its bits, with as large a smallest tile as it can; see the module."""
    kinds = (True, False) if shape[0] * shape[1] <= _SMALL else (True,)
    sizes = tuple(tile for tile in TILES if tile <= _HEAD_ROWS or shape[0] < _HEAD_OUTPUTS)
    trials = [Trial(shape, dtype, rows=sizes[0], bias=bias, zero=zero) for zero in kinds]
    for bases in ((BASE_TILE, *_NARROW), (1,)):
        for name, form in forms.items():
            products = [form(trial.weight, trial.bias) for trial in trials]
            for base in bases:
                found = [trial.all(product, base) for trial, product in zip(trials, products, strict=True)]
                tiles = _exact_tiles(trials, products, found, base, sizes)
                if tiles:
                    return Recipe(name, tiles, True, _digest(trials, found), *_times(trials[0], products[0], tiles))
    log.warning("%s products with a weight of %s: a row's bits depend on its place in every form", dtype, shape)
    name, form = next(iter(forms.items()))
    product = form(trials[0].weight, trials[0].bias)
    found = [trials[0].all(product, BASE_TILE)]
    return Recipe(name, (BASE_TILE,), False, _digest(trials, found), *_times(trials[0], product, (BASE_TILE,)))


def _exact_tiles(
    trials: list[Trial], products: list[Product], found: list[torch.Tensor], base: int, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """``base`` and those of ``sizes`` that agree with it; nothing if its own rows depend on their place."""
    tried = list(zip(trials, products, found, strict=True))

    def agrees(tile: int, *shifts: int) -> bool:
        return all(trial.agrees(product, tile, shift, found) for shift in shifts for trial, product, found in tried)

    if not all(trial.alone(found) for trial, _, found in tried) or not agrees(base, 1, 5):
        return ()
    return (*(tile for tile in (*sizes, *_NARROW) if tile > base and agrees(tile, 0, 1)), base)


def _digest(trials: list[Trial], found: list[torch.Tensor]) -> str:
    """Of the base tile's results."""
    return probe.digest(result[trial.whole] for trial, result in zip(trials, found, strict=False))


def _times(trial: Trial, product: Product, tiles: tuple[int, ...]) -> tuple[float, float]:
    rows = trial.rows[:_TIMED_ROWS]
    pieces = torch.split(rows, next(tile for tile in tiles if tile <= _TIMED_ROWS))
    whole = plain(trial.weight, trial.bias)
    return _seconds(lambda: [product(piece) for piece in pieces]), _seconds(lambda: whole(rows))


def _seconds(call: Callable[[], object]) -> float:
    """The best of five runs; of fewer, where one takes long."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
        if best > 0.05:
            break
    return best


class Trial:
    """A weight, and rows, some of them not a number.

    Args:
        shape: of the weight.
        dtype: of all.
        rows: how many; the largest tile to be tried.
        bias: whether there is one.
        zero: whether what is added up amounts to exactly zero, see `worker.kernels.probe`.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, *, rows: int, bias: bool, zero: bool) -> None:
        outputs, inputs = shape
        generator = torch.Generator().manual_seed(inputs + zero)
        weight = probe.spread(generator, min(outputs, _DRAWN_OUTPUTS), inputs)
        given = probe.spread(generator, rows, inputs)
        if zero:
            halves = probe.pairs(generator, inputs)
            weight, given = probe.same(weight, halves, 1, -1), probe.same(given, halves, 1)
        copies = -(-outputs // len(weight))
        self.weight = weight.to(dtype).repeat(copies, 1)[:outputs]
        self.bias = probe.spread(generator, outputs).to(dtype) * (0 if zero else 1) if bias else None
        self.whole = torch.arange(rows) % _BROKEN != _BROKEN // 2
        self.rows = given.to(dtype)
        self.rows[~self.whole] = torch.nan

    def all(self, product: Product, tile: int) -> torch.Tensor:
        """The results of all rows, in tiles."""
        return torch.cat([product(piece) for piece in torch.split(self.rows, tile)])

    def agrees(self, product: Product, tile: int, shift: int, expected: torch.Tensor) -> bool:
        """Whether one tile, of rows that each moved ``shift`` places, gives them the bits that they had in `all`."""
        places = (torch.arange(len(self.rows)) - shift) % len(self.rows)
        taken = places[-tile:]
        found = product(self.rows[places][-tile:])
        whole = self.whole[taken]
        return torch.equal(found[whole], expected[taken[whole]])

    def alone(self, found: torch.Tensor) -> bool:
        """Whether the rows that are no numbers left the others alone."""
        return bool(found[self.whole].isfinite().all())
