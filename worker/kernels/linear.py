"""Matrix products whose bits for one row do not depend on the rows beside it.

A BLAS library picks its blocking by the number of rows, and with it the order in which a row's products are added: the
same row comes out with other bits in a batch of 7 than in a batch of 300. On machines with AMX that holds for
bfloat16 too. So the products here only ever see a few fixed numbers of rows, the *tiles*. Which of them agree, bit for
bit and at any place in the tile, is measured when a layer is made: it differs between machines, types and shapes.

It also differs with the number of threads, so layers are made under the number that they will run with. The smallest
tile's bits did not, for any shape tried in bfloat16; in float32 those of large weights do.

In bfloat16 the weight is reordered once for oneDNN, with a hint of one row. That is the layout whose results were the
same for tiles of 16 to 128 rows for most shapes tried, and also the fastest.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from worker.kernels import probe

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

BASE_TILE = 16
"""The smallest tile, in rows. A runner pads its rows to a multiple of it, once for the whole model."""

TILES = (128, 64, 32, BASE_TILE)
"""Tiles to try, largest first."""

_FIXED_COST_ROWS = 45
"""What a product costs before its first row (mostly reading the weights), in rows. Only used to choose a padding."""


class RowExactLinear(nn.Module):
    """``y = x @ weight.T + bias`` with the promise of this module.

    Args:
        weight: ``[out_features, in_features]``, float32 or bfloat16, on the CPU. Not kept when it gets packed.
        bias: ``[out_features]`` or None.
        tiles: sizes known to agree for this shape, as `exact_tiles` returns them; None measures them.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, tiles: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = weight.dtype == torch.bfloat16 and has_packed_bfloat16()
        self.tiles = (
            exact_tiles(_bare_product, (self.out_features, self.in_features), weight.dtype) if tiles is None else tiles
        )
        self._weight = _pack(weight) if self.packed else weight.detach()
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[..., in_features]`` -> ``[..., out_features]``. Rows beside whole tiles are padded with zeros."""
        rows = x.numel() // self.in_features
        if rows in self.tiles:
            return self._product(x)
        flat = x.reshape(rows, self.in_features)
        padded = -rows % self.tiles[-1]
        if padded:
            flat = F.pad(flat, (0, 0, 0, padded))
        pieces = [self._product(flat[start:stop]) for start, stop in cuts(rows + padded, self.tiles)]
        result = torch.cat(pieces) if pieces else flat.new_empty(0, self.out_features)
        return result[:rows].view(*x.shape[:-1], self.out_features)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return _packed_product(x, self._weight, self._bias) if self.packed else F.linear(x, self._weight, self._bias)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, tiles={self.tiles}, packed={self.packed}"


@lru_cache(maxsize=4096)
def cuts(rows: int, tiles: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """``rows`` as consecutive ``(start, stop)`` pairs, each as long as a tile; largest first."""
    result: list[tuple[int, int]] = []
    start = 0
    for tile in tiles:
        while rows - start >= tile:
            result.append((start, start + tile))
            start += tile
    return tuple(result)


@lru_cache(maxsize=4096)
def padded_rows(rows: int, tiles: tuple[int, ...] = TILES) -> int:
    """The number of rows to run ``rows`` as: a multiple of the smallest tile that makes few and large tiles.

    48 rows cost less as one tile of 64 than as 32 and 16, because each tile reads all the weights again.
    """
    base = tiles[-1]
    least = -(-rows // base) * base

    def cost(count: int) -> int:
        return len(cuts(count, tiles)) * _FIXED_COST_ROWS + count

    return min(range(least, least + tiles[0], base), key=cost)


def exact_tiles(
    make: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]],
    shape: tuple[int, int],
    dtype: torch.dtype,
    tiles: tuple[int, ...] = TILES,
) -> tuple[int, ...]:
    """Those of ``tiles`` that give each row the same bits as the smallest one does, at any place in the tile.

    The smallest always stays, even where its own rows depend on their place: that is logged, and no promise holds.

    Args:
        make: from a weight ``[out_features, in_features]`` to its product with a number of rows.
        shape: of the weight. A weight of our own is tried, see `worker.kernels.probe`.
        dtype: of the weight and the rows.
        tiles: largest first.
    """
    generator = torch.Generator().manual_seed(shape[1])
    halves = probe.pairs(generator, shape[1])
    product = make(probe.same(probe.spread(generator, *shape), halves, 1, -1).to(dtype))
    rows = probe.same(probe.spread(generator, tiles[0], shape[1]), halves, 1).to(dtype)
    base = tiles[-1]

    def run(tile: int, shift: int) -> torch.Tensor:
        moved = rows.roll(shift, 0)
        result = torch.cat([product(moved[start : start + tile]) for start in range(0, len(rows), tile)])
        return result.roll(-shift, 0)

    expected = run(base, 0)
    if not torch.equal(run(base, 5), expected):
        log.warning("%s products with a weight of %s depend on a row's place in its tile", dtype, shape)
    return tuple(
        tile for tile in tiles if tile == base or all(torch.equal(run(tile, shift), expected) for shift in (0, 5))
    )


@lru_cache(maxsize=1)
def has_packed_bfloat16() -> bool:
    """Whether this build of PyTorch and this CPU have bfloat16 products with reordered weights."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _bare_product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product that a layer with this weight and no bias uses."""
    if weight.dtype == torch.bfloat16 and has_packed_bfloat16():
        packed = _pack(weight)
        return lambda x: _packed_product(x, packed, None)
    return lambda x: F.linear(x, weight)


def _packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return cast("torch.Tensor", torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], ""))


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1))
