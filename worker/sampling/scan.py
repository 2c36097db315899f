"""The passes over whole vocabularies: the highest logit of each block of tokens, and how likely each block is.

By a native kernel for rows in the CPU's memory, where one is there; else by torch, which goes over the memory more
often. A worker has one of them, so that a distribution has the same bits whenever it is looked at.
A row's numbers have the same bits whatever the other rows, their number and the threads: maxima are exact; subtraction,
division and ``exp`` go element by element; a block is summed on its own, in one order.
"""

from __future__ import annotations

import ctypes
import hashlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from worker.kernels.native.library import address

if TYPE_CHECKING:
    import numpy.typing as npt

    from worker.kernels.native.library import Native

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]
    Doubles = npt.NDArray[np.float64]

BLOCK: Final = 64
"""Tokens per block; the native kernel's is the same."""

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
    """Scans rows. It keeps a buffer, so one caller at a time.

    Args:
        native: the kernels to use for rows in the CPU's memory.
    """

    def __init__(self, native: Native | None = None) -> None:
        self._native = native
        self._weights = torch.empty(0)

    def __call__(self, matrix: torch.Tensor, rows: Ints, temperatures: Floats) -> Scanned:
        """Scan float32 ``[n, a multiple of BLOCK]``, contiguous.

        Args:
            matrix: the logits; only read.
            rows: those whose weights are to be summed, rising; one may be there several times.
            temperatures: for each of them, above 0.
        """
        if self._native is not None and matrix.device.type == "cpu":
            return _scan_natively(self._native, matrix, rows, temperatures)
        return self._scan_by_torch(matrix, rows, temperatures)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of some sums: of equal ones, all are equal."""
        rows, temperatures = np.arange(8), np.linspace(0.5, 2, 8, dtype=np.float32)
        logits = torch.linspace(-60, 4, 8 * 4096).view(8, 4096)
        return hashlib.sha256(self(logits, rows, temperatures).sums.tobytes()).hexdigest()

    def weights(self, logits: Floats, highest: Floats, temperatures: Floats) -> Doubles:
        """Of single tokens, ``exp((logit - highest) / temperature)`` of arrays of one shape: 0 to 1."""
        if self._native is not None:
            return _weigh_natively(self._native, logits, highest, temperatures)
        with np.errstate(over="ignore"):  # as far below as numbers go: e to that is 0
            shifted = torch.from_numpy(logits - highest)
        weights: Doubles = shifted.div_(torch.from_numpy(temperatures)).exp_().double().numpy()
        return weights

    def copy(self, matrix: torch.Tensor, rows: Ints, out: torch.Tensor) -> None:
        """Copy some rows of float32 ``[n, width]`` to the beginnings of those of ``out``."""
        width = matrix.shape[1]
        if self._native is None or matrix.device.type != "cpu":
            torch.index_select(matrix, 0, torch.from_numpy(rows).to(matrix.device), out=out[:, :width])
            return
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        if len(rows) != len(out) or width > out.shape[1] or not ((rows >= 0) & (rows < len(matrix))).all():
            raise ValueError(f"rows {rows} of {list(matrix.shape)} don't fit into {list(out.shape)}")
        self._native.call(
            "copy_rows",
            _RowCopy(
                source=address(matrix, torch.float32, *matrix.shape),
                stride=matrix.stride(0) * 4,
                which=rows.ctypes.data,
                rows=len(rows),
                to=address(out, torch.float32, *out.shape),
                to_stride=out.stride(0) * 4,
                size=width * 4,
            ),
        )

    def _scan_by_torch(self, matrix: torch.Tensor, rows: Ints, temperatures: Floats) -> Scanned:
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

    def _sum(self, logits: torch.Tensor, maxima: torch.Tensor, divisors: torch.Tensor, out: torch.Tensor) -> None:
        if self._weights.numel() < logits.numel() or self._weights.device != logits.device:
            self._weights = torch.empty(logits.numel(), device=logits.device)
        weights = self._weights[: logits.numel()].view_as(logits)
        torch.sub(logits, maxima.amax(dim=-1)[:, None, None], out=weights)
        torch.exp(weights.div_(divisors[:, None, None]), out=weights)
        torch.sum(weights, dim=-1, out=out)


class _LogitScan(ctypes.Structure):
    """``LogitScan`` of ``logits.h``."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("maxima", ctypes.c_void_p),
        ("highest", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    )


class _LogitWeights(ctypes.Structure):
    """``LogitWeights`` of ``logits.h``."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("highest", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class _RowCopy(ctypes.Structure):
    """``RowCopy`` of ``logits.h``."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("which", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("to", ctypes.c_void_p),
        ("to_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
    )


def _weigh_natively(native: Native, logits: Floats, highest: Floats, temperatures: Floats) -> Doubles:
    shape = logits.shape
    arrays = [np.ascontiguousarray(np.broadcast_to(array, shape)) for array in (logits, highest, temperatures)]
    assert all(array.dtype == np.float32 for array in arrays)
    weights = np.empty(shape)
    native.call(
        "weigh_logits",
        _LogitWeights(*(array.ctypes.data for array in arrays), weights=weights.ctypes.data, count=weights.size),
    )
    return weights


def _scan_natively(native: Native, matrix: torch.Tensor, rows: Ints, temperatures: Floats) -> Scanned:
    count, width = matrix.shape
    blocks = -(-width // BLOCK)
    found = Scanned(
        np.empty((count, blocks), dtype=np.float32),
        np.empty(count, dtype=np.float32),
        np.empty((len(rows), blocks), dtype=np.float32),
    )
    firsts = np.searchsorted(rows, np.arange(count + 1))
    temperatures = np.ascontiguousarray(temperatures, dtype=np.float32)
    native.call(
        "scan_logits",
        _LogitScan(
            logits=address(matrix, torch.float32, count, width),
            stride=matrix.stride(0),
            vocabulary=width,
            rows=count,
            maxima=found.maxima.ctypes.data,
            highest=found.highest.ctypes.data,
            firsts=firsts.ctypes.data,
            temperatures=temperatures.ctypes.data,
            sums=found.sums.ctypes.data,
        ),
    )
    return found


def _host(tensor: torch.Tensor) -> Floats:
    found: Floats = tensor.cpu().numpy()
    return found
