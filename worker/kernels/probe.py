"""Data that makes a change in the order of additions visible.

Rounding to bfloat16 hides nearly all of what another order changes: comparing results for ordinary data could pass a
kernel that differs once in a million elements. So every probe here adds up to exactly zero: each term has its negative
somewhere else in the sum, and the terms spread over many magnitudes. What a kernel returns is then nothing but its own
rounding, and any other order of additions gives something else in almost every element.
"""

from __future__ import annotations

import torch


def spread(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random float32 numbers of many magnitudes, either sign."""
    exponents = torch.rand(*shape, generator=generator) * 12 - 6
    return torch.randn(*shape, generator=generator) * torch.exp2(exponents)


def pairs(generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two halves of the numbers below ``count``, in random order; the last one is left out of an odd count."""
    order = torch.randperm(count, generator=generator)
    return order[: count // 2], order[count // 2 : count // 2 * 2]


def same(values: torch.Tensor, halves: tuple[torch.Tensor, torch.Tensor], dim: int, sign: int = 1) -> torch.Tensor:
    """``values`` with what the second half of ``dim`` holds replaced by ``sign`` times the first; 0 in neither."""
    result = torch.zeros_like(values)
    first = values.index_select(dim, halves[0])
    return result.index_copy_(dim, halves[0], first).index_copy_(dim, halves[1], sign * first)
