"""Functions of single numbers whose bits do not depend on where in a tensor the number is.

torch computes such a function a few vectors at a time, and what is left at the end of a thread's share with another
routine, for single numbers, that rounds differently: SiLU in float32 and GELU in either type have other bits there.
Where the ends are depends on the size of the tensor and the number of threads: on the neighbours. So a function only
ever gets tensors that torch cuts into shares of whole vectors; where the size is not such a one, it is called in pieces
that are.

Sums, products, quotients and roots of single numbers need none of that: either routine is exact to the last bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from worker.kernels import probe

if TYPE_CHECKING:
    from collections.abc import Callable

UNIT = 64
"""A multiple of the numbers that torch handles at a time: two vectors of at most 64 bytes."""

SHARE = 1 << 15
"""For each so many numbers, torch gives work to another thread. Some functions are given to all threads much sooner."""

PIECE = 1 << 12
"""So many are computed by one thread, whatever the function."""

_NUMBERS = 1 << 16


class RowExactActivation(nn.Module):
    """``function`` of every number of a tensor.

    Args:
        function: maps a tensor to one of the same shape and type, each number for itself.
    """

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape; the result is contiguous."""
        x = x.contiguous()
        count = x.numel()
        if is_even(count, torch.get_num_threads()):
            result: torch.Tensor = self.function(x)
            return result
        flat = x.view(-1)
        result = torch.empty_like(flat)
        whole = count // UNIT * UNIT
        for start in range(0, whole, PIECE):
            stop = min(start + PIECE, whole)
            result[start:stop] = self.function(flat[start:stop])
        if whole < count:
            result[whole:] = self.function(F.pad(flat[whole:], (0, whole + UNIT - count)))[: count - whole]
        return result.view(x.shape)


@lru_cache(maxsize=4096)
def is_even(count: int, threads: int) -> bool:
    """Whether each thread gets a share of whole units when torch cuts up ``count`` numbers, into few shares or many."""
    few = min(threads, max(1, -(-count // SHARE)))
    return count % UNIT == 0 and all(-(-count // shares) % UNIT == 0 for shares in (few, threads))


class Measured(NamedTuple):
    """What was found out about a function."""

    exact: bool
    """Whether the bits of a result really do not depend on its place."""
    digest: str
    """Of what the function makes of numbers of all magnitudes, in bfloat16 of every number."""


def measure(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Measured:
    """Moves numbers about, for the present number of threads, and looks whether their results change."""
    numbers = _numbers(dtype)
    expected = function(numbers)
    shares = UNIT * torch.get_num_threads()

    def agrees(count: int) -> bool:
        places = (torch.arange(count) * 5 + 1) % _NUMBERS
        return torch.equal(_bits(function(numbers[places])), _bits(expected[places]))

    counts = (_NUMBERS - 7, _NUMBERS // 3, 16 * shares, _NUMBERS // shares * shares + shares)
    return Measured(all(agrees(count) for count in counts), probe.digest([_bits(expected)]))


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    return probe.spread(torch.Generator().manual_seed(0), _NUMBERS).to(dtype)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """As integers; all that are not numbers are one."""
    plain = values.masked_fill(values.isnan(), torch.nan)
    return plain.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
