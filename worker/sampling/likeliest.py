"""The likeliest tokens of rows of logits, found without sorting whole vocabularies.

What lies above some logit is only in blocks whose maximum does. So an edge is guessed from the blocks' maxima, and what
is above it is taken out of the few blocks that have any of it, and sorted. Where the guess was too high, everything is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from worker.sampling.scan import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from worker.sampling.logit_rows import LogitRows
    from worker.sampling.scan import Doubles, Floats, Ints

    Flags = npt.NDArray[np.bool_]
    Bits = npt.NDArray[np.uint32]

BOTTOM: Final = np.float32(-np.inf)
MOST_ROWS: Final = 64
"""How many rows can be looked at together."""
ID_BITS: Final = np.uint64(26)
ROW_BITS: Final = np.uint64(26 + 32)
"""Where in a sorting key the row begins; the logit comes between."""
SIGN: Final = np.uint32(0x80000000)
MARGIN: Final = 0.5
"""How much of what may be left out is guessed to be below an edge. In real logits half is nearly always enough."""


@dataclass(frozen=True, slots=True)
class Likeliest:
    """All tokens of some rows that are above an edge: row by row, highest first, the lower id first among equals.

    Tokens that can't be chosen, with logit -inf, are never among them.
    """

    owners: Ints
    """``[found]``: the row of each."""
    ids: Ints
    """``[found]``"""
    logits: Floats
    """``[found]``"""
    ends: Ints
    """``[rows]``: where each row's tokens end. They begin where those of the one before end."""
    edges: Floats
    """``[rows]``: every token above has been found. -inf: all that can be chosen."""

    @property
    def starts(self) -> Ints:
        return np.concatenate([[0], self.ends[:-1]])


def settle(rows: LogitRows, wanted: Ints, edges: Floats, use: Callable[[Likeliest, Ints], Flags]) -> None:
    """Look at the likeliest tokens of the rows ``wanted``: those above ``edges``, or all if that isn't enough.

    ``use`` is given what was found for some of the rows, and their indices in ``wanted``; it says for which of them
    that is enough. It must be with an edge of -inf.
    """
    unsettled = np.arange(len(wanted))
    unsettled = unsettled[~use(_above(rows, wanted, edges), unsettled)]
    if len(unsettled):
        enough = use(_above(rows, wanted[unsettled], np.full(len(unsettled), BOTTOM)), unsettled)
        assert enough.all()


def edges_by_count(rows: LogitRows, wanted: Ints, counts: Ints) -> Floats:
    """Edges above which there probably are so many tokens of each row, ``[rows]``.

    So many blocks have one each. Some more allow for equals, for of those at an edge none is above it.
    """
    maxima = np.sort(rows.maxima[wanted], axis=1)
    places = rows.blocks - (counts + counts // 4 + 8)
    edges: Floats = maxima[np.arange(len(wanted)), np.maximum(places, 0)]
    edges[places < 0] = BOTTOM
    return edges


def edges_by_share(rows: LogitRows, wanted: Ints, slots: Ints, shares: Doubles) -> Floats:
    """Edges below which there probably is less than a share of each row's weight, ``[rows]``.

    ``slots`` says which of the sums are theirs. Blocks whose maximum is below an edge show how much of a block is.
    """
    keys = _rising(rows.maxima[wanted]).astype(np.uint64) << np.uint64(32) | rows.sums[slots].view(np.uint32)
    keys.sort(axis=1)
    below = keys.astype(np.uint32).view(np.float32).cumsum(axis=1, dtype=np.float64)
    limits = below[:, -1] * shares * MARGIN
    below *= rows.blocks / np.arange(1, rows.blocks + 1)
    places = (below > limits[:, None]).argmax(axis=1) - 1
    edges = _risen((keys[np.arange(len(wanted)), np.maximum(places, 0)] >> np.uint64(32)).astype(np.uint32))
    edges[places < 0] = BOTTOM
    return edges


def tokens_above(rows: LogitRows, wanted: Ints, edges: Floats) -> tuple[Ints, Ints, Floats]:
    """All tokens above an edge in each of the rows ``wanted``: their rows, which rise, their ids and their logits."""
    owners, blocks = np.divmod(np.flatnonzero(rows.maxima[wanted] > edges[:, None]), rows.blocks)
    found = rows.block(wanted[owners], blocks)
    above = np.flatnonzero(found > edges[owners, None])
    entries, places = np.divmod(above, BLOCK)
    return owners[entries], blocks[entries] * BLOCK + places, found.reshape(-1)[above]


def _above(rows: LogitRows, wanted: Ints, edges: Floats) -> Likeliest:
    assert len(wanted) <= MOST_ROWS
    owners, ids, logits = tokens_above(rows, wanted, edges)
    # Keys that rise with the row, then as logits fall, then with the id.
    falling = (~_rising(logits)).astype(np.uint64)
    keys = owners.astype(np.uint64) << ROW_BITS | falling << ID_BITS | ids.astype(np.uint64)
    keys.sort()
    return Likeliest(
        owners=owners,
        ids=(keys & np.uint64((1 << 26) - 1)).astype(np.int64),
        logits=_risen(~(keys >> ID_BITS).astype(np.uint32)),
        ends=np.bincount(owners, minlength=len(edges)).cumsum(),
        edges=edges,
    )


def _rising(logits: Floats) -> Bits:
    """Numbers in the order of the logits. Of what is negative all bits are turned round, else the sign alone."""
    bits = (logits + np.float32(0)).view(np.uint32)  # -0 becomes 0
    return np.where(bits < SIGN, bits | SIGN, ~bits)


def _risen(numbers: Bits) -> Floats:
    """The logits of such numbers."""
    return np.where(numbers < SIGN, ~numbers, numbers ^ SIGN).view(np.float32)
