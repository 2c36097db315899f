"""Heads of prefixes, which stay in the pool while what continues them leaves it.

The first hole ends a prefix, so a page without what it continues is worth nothing. A head that is used all the time is
never given up by the pool: nothing would bring it to the store, and what is there of it would be dropped before its
tails.

    a tail is stored ──▶ what it continues is renewed, in the same call ──▶ lacking? ──▶ read between steps, stored

A head counts as used some seconds ahead. So it goes after its tails, however often those are stored meanwhile, and it
isn't renewed with each of them.

Pure: times come from the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstore.page_store import RANK_MS, PageRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.block_hash import BlockHash

AHEAD_S: Final = 5.0
"""So long a head counts as used when its use is told."""
AHEAD_RANKS: Final = int(AHEAD_S * 1000 / RANK_MS)
MOST: Final = 8192
"""Heads that are to be renewed, or are remembered, at most."""

Place = tuple["BlockHash", int]
"""A block's hash, and its position in the prefix."""


class Heads:
    """What of them is to be renewed, and what of them the store lacks."""

    def __init__(self) -> None:
        self._due: dict[BlockHash, int] = {}
        """To be renewed: positions."""
        self._known: OrderedDict[BlockHash, float] = OrderedDict()
        """Until when they need not be renewed, or asked for, again; the oldest first."""
        self._lacking: dict[BlockHash, int] = {}
        """Not in the store: positions."""

    def __bool__(self) -> bool:
        """Whether any is to be renewed."""
        return bool(self._due)

    def continued(self, chains: Iterable[Sequence[BlockHash]], now: float) -> None:
        """Pages that continue these were used: the hashes of all blocks before them, from the first one on."""
        for chain in chains:
            for position, hash_ in enumerate(chain):
                if len(self._due) < MOST and self._known.get(hash_, now) <= now:
                    self._due[hash_] = position

    def take(self, most: int) -> list[PageRef]:
        """Those to be renewed next. ``renewed`` or ``failed`` answers it."""
        taken = [*islice(self._due.items(), most)]
        for hash_, _ in taken:
            del self._due[hash_]
        return [PageRef(hash_, position - AHEAD_RANKS) for hash_, position in taken]

    def failed(self, refs: Iterable[PageRef]) -> None:
        """The store could not be asked: they are still to be renewed, if there is room."""
        for hash_, rank in refs:
            if len(self._due) < MOST:
                self._due.setdefault(hash_, rank + AHEAD_RANKS)

    def renewed(self, refs: Iterable[PageRef], there: Iterable[bool], asked: float) -> None:
        """Which of them the store has. ``asked``: when it was asked."""
        for (hash_, rank), is_there in zip(refs, there, strict=True):
            self._known[hash_] = asked + AHEAD_S
            self._known.move_to_end(hash_)
            if not is_there and len(self._lacking) < MOST:
                self._lacking[hash_] = rank + AHEAD_RANKS
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    def lacking(self, most: int) -> list[Place]:
        """So many of those that the store lacks, at most, each of them once."""
        taken = [*islice(self._lacking.items(), max(most, 0))]
        for hash_, _ in taken:
            del self._lacking[hash_]
        return taken
