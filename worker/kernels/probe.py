"""Data that makes a change in the order of additions visible.

Rounding to bfloat16 hides nearly all of what another order changes: comparing results for ordinary data could pass a
kernel that differs once in a million elements. So most of what is probed here adds up to exactly zero: each term has
its negative somewhere else in the sum, and the terms spread over many magnitudes. What a kernel returns is then nothing
but its own rounding, and any other order of additions gives something else in almost every element.

Everything is drawn as whole numbers, so the data is the same on every machine, and a digest of what a kernel makes of
it tells machines with other bits apart.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_POWERS = torch.tensor([2.0**power for power in range(-30, -18)])


def spread(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random float32 numbers of 24 bits and many magnitudes below 32, either sign."""
    digits = torch.randint(-(1 << 24) + 1, 1 << 24, shape, generator=generator).to(torch.float32)
    return digits * _POWERS[torch.randint(len(_POWERS), shape, generator=generator)]


def pairs(generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two halves of the numbers below ``count``, in random order; the last one is left out of an odd count."""
    order = torch.randperm(count, generator=generator)
    return order[: count // 2], order[count // 2 : count // 2 * 2]


def same(values: torch.Tensor, halves: tuple[torch.Tensor, torch.Tensor], dim: int, sign: int = 1) -> torch.Tensor:
    """``values`` with what the second half of ``dim`` holds replaced by ``sign`` times the first; 0 in neither."""
    result = torch.zeros_like(values)
    first = values.index_select(dim, halves[0])
    return result.index_copy_(dim, halves[0], first).index_copy_(dim, halves[1], sign * first)


def digest(results: Iterable[torch.Tensor]) -> str:
    """SHA-256 (hex) of the bits of some tensors, on any device."""
    found = hashlib.sha256()
    for result in results:
        found.update(result.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
