"""The passes over whole vocabularies: the highest logit of each block of tokens, and how likely each block is.

A row's numbers have the same bits whatever the other rows, their number and the threads: maxima are exact; subtraction,
division and ``exp`` go element by element; a block is summed on its own, in one order.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]
    Doubles = npt.NDArray[np.float64]

BLOCK: Final = 64
"""Tokens per block."""

AT_ONCE: Final = 200_000
"""Logits, about, whose weights torch makes and sums at once, so that they stay in a core's second-level cache."""


class Scanned(NamedTuple):
    """What is found in some rows. On the host."""

    maxima: Floats
    """The highest logit of each block, ``[rows, blocks]``; NaN where there is one."""
    highest: Floats
    """The highest logit of each row."""
    sums: Floats
    """``[wanted, blocks]``: of a block's ``exp((logit - highest) / temperature)``."""


class Scanner:
    """Scans rows. It keeps a buffer, so one caller at a time."""

    def __init__(self) -> None:
        self._weights = torch.empty(0)

    def __call__(self, matrix: torch.Tensor, rows: Ints, temperatures: Floats) -> Scanned:
        """Scan float32 ``[n, a multiple of BLOCK]``, contiguous.

        Args:
            matrix: the logits; only read.
            rows: those whose weights are to be summed, rising; one may be there several times.
            temperatures: for each of them, above 0.
        """
        logits = matrix.view(len(matrix), -1, BLOCK)
        maxima = torch.empty(logits.shape[:2], device=matrix.device)
        sums = torch.empty(len(rows), logits.shape[1], device=matrix.device)
        divisors = torch.from_numpy(temperatures).to(matrix.device)
        size = max(1, AT_ONCE // matrix.shape[1])
        places = np.searchsorted(rows, np.arange(0, len(matrix) + size, size))
        for start, (first, past) in zip(range(0, len(matrix), size), pairwise(places.tolist()), strict=False):
            part = slice(start, start + size)
            torch.amax(logits[part], dim=-1, out=maxima[part])
            if past > first:
                own = rows[first:past]
                # A slice where they are one after the other, which is no copy.
                which = slice(int(own[0]), int(own[-1]) + 1) if (np.diff(own) == 1).all() else torch.from_numpy(own)
                self._sum(logits[which], maxima[which], divisors[first:past], sums[first:past])
        return Scanned(_host(maxima), _host(maxima.amax(dim=-1)), _host(sums))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of some sums: of equal ones, all are equal."""
        rows, temperatures = np.arange(8), np.linspace(0.5, 2, 8, dtype=np.float32)
        logits = torch.linspace(-60, 4, 8 * 4096).view(8, 4096)
        return hashlib.sha256(self(logits, rows, temperatures).sums.tobytes()).hexdigest()

    def weights(self, logits: Floats, highest: Floats, temperatures: Floats) -> Doubles:
        """Of single tokens, ``exp((logit - highest) / temperature)`` of arrays of one shape: 0 to 1."""
        with np.errstate(over="ignore"):  # as far below as numbers go: e to that is 0
            shifted = torch.from_numpy(logits - highest)
        weights: Doubles = shifted.div_(torch.from_numpy(temperatures)).exp_().double().numpy()
        return weights

    def _sum(self, logits: torch.Tensor, maxima: torch.Tensor, divisors: torch.Tensor, out: torch.Tensor) -> None:
        if self._weights.numel() < logits.numel() or self._weights.device != logits.device:
            self._weights = torch.empty(logits.numel(), device=logits.device)
        weights = self._weights[: logits.numel()].view_as(logits)
        torch.sub(logits, maxima.amax(dim=-1)[:, None, None], out=weights)
        torch.exp(weights.div_(divisors[:, None, None]), out=weights)
        torch.sum(weights, dim=-1, out=out)


def _host(tensor: torch.Tensor) -> Floats:
    found: Floats = tensor.cpu().numpy()
    return found
