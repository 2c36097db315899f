"""Rows of logits, cut into blocks of tokens, and what is known of each block.

``scan`` goes over whole vocabularies. What follows, on the host, looks at what it found and at a few blocks' logits.
From the sums on, masses are whole units, and their sums exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from worker.sampling.scan import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.sampling.scan import Doubles, Floats, Ints, Scanner

MOST: Final = float(np.finfo(np.float32).max)


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

    def __init__(
        self, logits: torch.Tensor, rows: Sequence[int], wanted: Wanted, scanner: Scanner, scratch: Scratch
    ) -> None:
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
        self.sum_scales = Scales(scanner, self.highest, self.highest)
        """How logits became the weights in ``sums``."""
        self._scanner = scanner
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
        torch.index_select(logits, 0, torch.tensor(rows, device=logits.device), out=copy[:, : self.vocabulary])
        return copy

    def buffer(self, name: str, count: int, device: torch.device) -> torch.Tensor:
        """Room for rows, float32 ``[count, blocks * BLOCK]``. See ``Scratch.rows``."""
        return self._scratch.rows(name, count, self.blocks * BLOCK, device)

    def add(self, matrix: torch.Tensor, wanted: Wanted) -> None:
        """Take more rows, from a ``buffer``. Of ``wanted`` ones sum the weights."""
        found = self._scanner(matrix, wanted.rows - self._starts[-1], wanted.temperatures)
        self.maxima = _joined(self.maxima, found.maxima)
        self.highest = _joined(self.highest, found.highest)
        if len(wanted.rows):
            self.sums = _joined(self.sums, found.sums)
            self.sum_scales = self.sum_scales.with_others(self.scales(wanted.rows, wanted.temperatures))
        self._parts.append(matrix)
        self._starts.append(self._starts[-1] + len(matrix))

    def scales(self, rows: Ints, temperatures: Floats) -> Scales:
        """Of some of the rows."""
        return Scales(self._scanner, temperatures, self.highest[rows])

    def masses(self, slots: Ints) -> Doubles:
        """Some of ``sums`` in whole units, ``[n, blocks]``."""
        masses = self.sums[slots].astype(np.float64)
        masses *= self.unit
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
    """How the logits of some rows become weights, at some temperatures. Arrays are ``[rows]``."""

    scanner: Scanner
    temperatures: Floats
    highest: Floats
    """The rows' highest logits."""

    def of(self, some: Ints) -> Scales:
        """Of some of the rows."""
        return Scales(self.scanner, self.temperatures[some], self.highest[some])

    def with_others(self, others: Scales) -> Scales:
        """Of these rows, then those."""
        return Scales(
            self.scanner,
            np.concatenate([self.temperatures, others.temperatures]),
            np.concatenate([self.highest, others.highest]),
        )

    def weights(self, logits: Floats, owners: Any) -> Doubles:
        """How likely tokens with these logits are, as a share of their rows' likeliest: 0 to 1. ``owners`` indexes the
        rows, so that it fits the logits."""
        return self.scanner.weights(logits, self.highest[owners], self.temperatures[owners])


def _joined(some: npt.NDArray[np.float32], others: npt.NDArray[np.float32]) -> Floats:
    return np.concatenate([some, others]) if len(some) else others
