"""Large runs of memory on huge pages: fewer addresses to look up, so half as much again is read in a second.

Where the system has none (or keeps them for who asks otherwise), it is ordinary memory.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

HUGE: Final = 2 << 20
"""Bytes of a huge page, on the processors that matter here."""
ALIGNED: Final = 64
"""What every tensor here begins at a multiple of, in bytes."""


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros. Memory is taken when it is first written to or read from.

    Raises:
        MemoryError: there is no room for it, even as addresses.
    """
    (made,) = together([shape], dtype)
    return made


def together(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of zeros that lie one after the other, so that small ones share huge pages."""
    shapes = list(shapes)
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
    try:  # private: what is shared with children has huge pages only where another setting says so
        memory = mmap.mmap(-1, max(starts[-1], 1) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {starts[-1]} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    return [
        whole[first + start : first + start + size].view(dtype).view(shape)
        for start, size, shape in zip(starts[:-1], sizes, shapes, strict=True)
    ]
