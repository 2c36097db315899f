"""Linear layers whose bits for one row do not depend on the rows beside it.

A layer runs its rows in tiles, see `worker.kernels.products`, where the form of the product and the sizes of the tiles
are measured. That also differs with the number of threads, so layers are made under the number that they will run with.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from worker.kernels.products import FORMS, TILES, choose

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIXED_COST_ROWS = 45
"""What a product costs before its first row (mostly reading the weights), in rows. Only used to choose a padding."""


class RowExactLinear(nn.Module):
    """``y = x @ weight.T + bias``, row by row as this module promises if its ``recipe`` is exact.

    Args:
        weight: ``[out_features, in_features]``, float32 or bfloat16, on the CPU. Kept in the form of the recipe only.
        bias: ``[out_features]`` or None.
        lean: whether the weight is to be used as it is, and not copied into another form.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, lean: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        shape = (self.out_features, self.in_features)
        self.recipe = choose(shape, weight.dtype, bias=bias is not None, lean=lean)
        self._product = FORMS[self.recipe.form](weight, None if bias is None else bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[..., in_features]`` -> ``[..., out_features]``. Rows beside whole tiles are padded with zeros."""
        rows, tiles = x.numel() // self.in_features, self.recipe.tiles
        if rows in tiles and x.is_contiguous():
            return self._product(x)
        flat = x.reshape(rows, self.in_features).contiguous()
        padded = -rows % tiles[-1]
        if padded:
            flat = F.pad(flat, (0, 0, 0, padded))
        result = flat.new_empty(rows + padded, self.out_features)
        for start, stop in cuts(rows + padded, tiles):
            result[start:stop] = self._product(flat[start:stop])
        return result[:rows].view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, {self.recipe.form}, tiles={self.recipe.tiles}"


class RowExactWeight(torch.Tensor):
    """A weight that a model hands to ``F.linear`` itself, which gives row-exact products with it.

    Made by `wrap`, of two dimensions, or of three: one weight for each expert, of which one is picked before it is
    used. All else is done to it as to any tensor, and gives plain tensors. No copy of the weight is kept.
    """

    layers: tuple[RowExactLinear, ...]

    @classmethod
    def wrap(cls, weight: torch.Tensor) -> RowExactWeight:
        """``weight``: ``[out_features, in_features]`` or ``[experts, out_features, in_features]``."""
        return cls._of(weight.detach(), [RowExactLinear(one, None, lean=True) for one in _matrices(weight)])

    @classmethod
    def _of(cls, weight: torch.Tensor, layers: Sequence[RowExactLinear]) -> RowExactWeight:
        wrapped = weight.as_subclass(cls)
        wrapped.layers = tuple(layers)
        return wrapped

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and isinstance(given[1], cls) and given[1].ndim == 2 and not options:
            (layer,), bias = given[1].layers, given[2] if len(given) > 2 else None
            return layer(given[0]) if bias is None else layer(given[0]) + bias
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*given, **(options or {}))
            picks = function is torch.Tensor.__getitem__ and given[0].ndim == 3 and result.ndim == 2
            return cls._of(result, [given[0].layers[int(given[1])]]) if picks else result


def _matrices(weight: torch.Tensor) -> list[torch.Tensor]:
    return [weight] if weight.ndim == 2 else list(weight)


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
