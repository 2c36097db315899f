"""Rows of logits, cut into blocks of tokens: all that is ever done to whole vocabularies.

One pass finds the highest logit of each block. Rows that need the sum of their distribution have two more: ``exp``, and
the sum of each block. What follows, on the host, looks at these and at a few blocks' logits. Weights are made for few
rows at a time and in a buffer that is kept, so that they stay in the processor's cache and touch no fresh memory.

A row's numbers have the same bits whatever the other rows, their number and the threads: maxima are exact; subtraction,
division and ``exp`` go element by element; a block is summed on its own, in one order. From there on masses are whole
units, and their sums exact.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]
    Doubles = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

BLOCK: Final = 64
"""Tokens per block."""

AT_ONCE: Final = 200_000
"""Logits, about, whose weights are made and summed at once, so that they stay in a core's second-level cache."""

MOST: Final = float(np.finfo(np.float32).max)

UNSHIFTED: Final = (-50.0, 80.0)
"""Between these a row's highest logit must lie for ``exp`` to be taken of the logits as they are, at temperature 1:
sums of a block stay finite, and what is 2^-53 as likely as the likeliest has all its bits."""


class Scratch:
    """Buffers that are kept from call to call: fresh memory costs more than what is done in it."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def rows(self, name: str, count: int, width: int, device: torch.device) -> torch.Tensor:
        """A float32 ``[count, width]`` with anything in it. The next call with this name takes it away again."""
        kept = self._kept.get(name)
        if kept is None or kept.shape[0] < count or kept.shape[1] != width or kept.device != device:
            kept = self._kept[name] = torch.empty(count, width, device=device)
        return kept[:count]


class Wanted(NamedTuple):
    """Rows whose weights are to be summed, rising, and the temperatures for that."""

    rows: Ints
    temperatures: Floats


class LogitRows:
    """Some rows, named by their places here; the first ones are the model's. One of them per ``Scratch`` at a time."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[int], wanted: Wanted, scratch: Scratch) -> None:
        """Take these rows of ``logits``, float32 ``[rows, vocabulary]``; rising numbers, at least one. Only reads them.

        Copies them if they aren't next to each other or can't be cut into whole blocks. ``wanted``: see ``add``.
        """
        self.vocabulary: Final = logits.shape[1]
        self.blocks: Final = -(-self.vocabulary // BLOCK)
        self.unit: Final = 2.0 ** (53 - (self.blocks * BLOCK).bit_length())
        """Of a mass: the likeliest token has so many, and all together have less than 2^53."""
        self.maxima: Floats = np.empty((0, self.blocks), dtype=np.float32)
        """The highest logit of each block, ``[rows, blocks]``; NaN where there is one."""
        self.highest: Floats = np.empty(0, dtype=np.float32)
        """The highest logit of each row."""
        self.sums: Floats = np.empty((0, self.blocks), dtype=np.float32)
        """The weight of each block of the rows wanted, ``[wanted, blocks]``; see ``masses``."""
        self.sum_scales = Scales(self.highest, self.highest, np.empty(0))
        """How logits became the weights in ``sums``."""
        self._scratch = scratch
        self._parts: list[torch.Tensor] = []
        self._starts = [0]
        self.add(self._taken(logits, rows), wanted)

    def _taken(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        first, past = rows[0], rows[-1] + 1
        together = past - first == len(rows)
        if together and self.vocabulary % BLOCK == 0 and logits.is_contiguous():
            return logits[first:past]
        copy = self.buffer("rows", len(rows), logits.device)
        copy[:, self.vocabulary :] = -torch.inf
        if together:
            copy[:, : self.vocabulary] = logits[first:past]
        else:
            torch.index_select(logits, 0, torch.tensor(rows, device=logits.device), out=copy[:, : self.vocabulary])
        return copy

    def buffer(self, name: str, count: int, device: torch.device) -> torch.Tensor:
        """Room for rows, float32 ``[count, blocks * BLOCK]``. See ``Scratch.rows``."""
        return self._scratch.rows(name, count, self.blocks * BLOCK, device)

    def add(self, matrix: torch.Tensor, wanted: Wanted) -> None:
        """Take more rows, from a ``buffer``. Of ``wanted`` ones sum the weights."""
        rows = wanted.rows - self._starts[-1]
        maxima, sums = self._scan(matrix, rows, wanted.temperatures)
        self.maxima = _joined(self.maxima, _host(maxima))
        self.highest = _joined(self.highest, _host(maxima.amax(dim=-1)))
        if len(rows):
            scales = self.scales(wanted.rows, wanted.temperatures)
            for index in np.flatnonzero((scales.shifts != 0) & (scales.temperatures == 1)).tolist():
                one, row = slice(index, index + 1), matrix[int(rows[index])].view(1, self.blocks, BLOCK)
                self._sum(row, _at(scales.shifts[one], matrix.device), None, sums[one])
            self.sums = _joined(self.sums, _host(sums))
            self.sum_scales = self.sum_scales.with_others(scales)
        self._parts.append(matrix)
        self._starts.append(self._starts[-1] + len(matrix))

    def _scan(self, matrix: torch.Tensor, rows: Ints, temperatures: Floats) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks' maxima, and the sums of the weights of ``rows`` while their logits are at hand.

        At temperature 1 ``exp`` is taken of the logits as they are, which is nearly always right.
        """
        logits = matrix.view(-1, self.blocks, BLOCK)
        if not len(rows):
            return logits.amax(dim=-1), torch.empty(0, self.blocks, device=matrix.device)
        maxima = torch.empty(len(matrix), self.blocks, device=matrix.device)
        sums = torch.empty(len(rows), self.blocks, device=matrix.device)
        divisors = _at(temperatures, matrix.device)
        size = max(1, AT_ONCE // matrix.shape[1])
        runs = deque(_runs(rows, temperatures == 1, size))
        for start in range(0, len(matrix), size):
            torch.amax(logits[start : start + size], dim=-1, out=maxima[start : start + size])
            while runs and runs[0].row < start + size:
                first, row, past, plain = runs.popleft()
                own, theirs = slice(row, row + past - first), slice(first, past)
                if plain:
                    self._sum(logits[own], None, None, sums[theirs])
                else:
                    self._sum(logits[own], maxima[own].amax(dim=-1), divisors[theirs], sums[theirs])
        return maxima, sums

    def _sum(
        self, logits: torch.Tensor, shifts: torch.Tensor | None, divisors: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Sum the weights of some rows' blocks, ``[rows, blocks, BLOCK]``."""
        weights = self.buffer("weights", len(logits), logits.device).view_as(logits)
        if shifts is not None:
            logits = torch.sub(logits, shifts[:, None, None], out=weights)
        if divisors is not None:
            logits = torch.div(logits, divisors[:, None, None], out=weights)
        torch.exp(logits, out=weights)
        torch.sum(weights, dim=-1, out=out)

    def scales(self, rows: Ints, temperatures: Floats) -> Scales:
        """Of some of the rows."""
        return Scales.of_rows(self.highest[rows], temperatures)

    def masses(self, slots: Ints) -> Doubles:
        """Some of ``sums`` in whole units, ``[n, blocks]``."""
        masses = self.sums[slots].astype(np.float64)
        masses *= self.unit
        masses /= self.sum_scales.peaks[slots, None]
        return np.floor(masses, out=masses)

    def block(self, rows: Ints, blocks: Ints) -> Floats:
        """Logits of one block of each of some rows, ``[n, BLOCK]``; -inf past the vocabulary's end.

        They hold until the next call.
        """
        found = self._scratch.rows("found", len(rows), BLOCK, torch.device("cpu"))
        for part, (first, past) in zip(self._parts, pairwise(self._starts), strict=True):
            here = slice(None) if past - first == len(self.highest) else np.flatnonzero((first <= rows) & (rows < past))
            wanted = torch.from_numpy((rows[here] - first) * self.blocks + blocks[here])
            own = part.view(-1, BLOCK)
            if len(self._parts) == 1 and own.device == found.device:
                torch.index_select(own, 0, wanted, out=found)
            else:
                found[here] = own.index_select(0, wanted.to(own.device)).cpu()
        return found.numpy()

    def copy_into(self, buffer: torch.Tensor, rows: Ints) -> None:
        """Copy some of the model's rows."""
        torch.index_select(self._parts[0], 0, torch.from_numpy(rows).to(buffer.device), out=buffer)


@dataclass(frozen=True, slots=True)
class Scales:
    """How the logits of some rows become weights, at some temperatures. All are arrays ``[rows]``."""

    temperatures: Floats
    shifts: Floats
    """What is taken off logits before they are divided by the temperature: 0 where ``exp`` goes well without."""
    peaks: Doubles
    """What the likeliest token's weight is a share of."""

    @classmethod
    def of_rows(cls, highest: Floats, temperatures: Floats) -> Scales:
        """By the highest logits."""
        low, high = UNSHIFTED
        unshifted = (temperatures == 1) & (low < highest) & (highest < high)
        shifts: Floats = np.where(unshifted, np.float32(0), highest)
        return cls(temperatures, shifts, _exp(highest, shifts, temperatures))

    def of(self, some: Ints) -> Scales:
        """Of some of the rows."""
        return Scales(self.temperatures[some], self.shifts[some], self.peaks[some])

    def with_others(self, others: Scales) -> Scales:
        """Of these rows, then those."""
        return Scales(
            np.concatenate([self.temperatures, others.temperatures]),
            np.concatenate([self.shifts, others.shifts]),
            np.concatenate([self.peaks, others.peaks]),
        )

    def weights(self, logits: Floats, owners: Any) -> Doubles:
        """How likely tokens with these logits are, as a share of their rows' likeliest: 0 to 1. ``owners`` indexes the
        rows, so that it fits the logits."""
        weights = _exp(logits, self.shifts[owners], self.temperatures[owners])
        weights /= self.peaks[owners]
        return weights


def _exp(logits: Floats, shifts: Floats, temperatures: Floats) -> Doubles:
    """By torch, as for whole rows: that the bits are the same keeps the parts of a distribution in proportion."""
    shifted = torch.from_numpy(logits) - torch.from_numpy(shifts)
    return shifted.div_(torch.from_numpy(temperatures)).exp_().double().numpy()


class _Run(NamedTuple):
    """Rows that lie together, are all plain or all not, and are taken together."""

    first: int
    """Where they begin among those that were asked for."""
    row: int
    past: int
    """Where they end among those that were asked for."""
    plain: bool


def _runs(rows: Ints, plain: Flags, size: int) -> list[_Run]:
    """Rising rows in runs, none of which crosses a multiple of ``size``."""
    if not len(rows):
        return []
    breaks = (np.diff(rows) != 1) | (plain[1:] != plain[:-1]) | (np.diff(rows // size) != 0)
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
    return [_Run(first, int(rows[first]), past, bool(plain[first])) for first, past in pairwise(edges)]


def _joined(some: npt.NDArray[np.float32], others: npt.NDArray[np.float32]) -> Floats:
    return np.concatenate([some, others]) if len(some) else others


def _at(array: Floats, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _host(tensor: torch.Tensor) -> Floats:
    found: Floats = tensor.cpu().numpy()
    return found
