"""The free blocks of a pool, and which of them comes next: singly, or in runs of neighbours.

A step reads a sequence's keys and values in the order of its table. Where neighbours in the table are neighbours in
memory, a processor may guess what comes next; whether it gains by that is what ``octavo tune`` measures.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from worker.scheduling.block import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class FreeStack:
    """Last freed, first reused: its pages are still warm in the processor's caches."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block: int) -> None:
        """A block that was used or cached is free now."""
        self._blocks.append(block)

    def rest(self, block: int) -> None:
        """A block that was used is cached now."""

    def take(self, count: int, table: Sequence[int]) -> list[int]:
        """Take ``count`` blocks, which there must be, to go on ``table``."""
        return [self._blocks.pop() for _ in range(count)]

    def in_order(self, blocks: list[int]) -> list[int]:
        """In which order to use blocks that come from elsewhere."""
        return blocks

    def check_integrity(self, used: Iterable[int]) -> None:
        """There is nothing that could contradict itself."""


class FreeRuns:
    """Neighbours, where there are any: in runs that grow with the sequence.

    Free blocks lie in *stretches* of neighbours, ``[first, past)``. Those that nobody has a claim to are *open*: as
    long as can be, and found by either end and by the class of their lengths (1, 2 to 3, 4 to 7, ...)::

        blocks    u u f f f f c u f f f f f f f f f        u: used, c: cached, f: free
        claimed       [2, 4)                               by the sequence that uses block 1
        open              [4, 6)    [8, 17)

    A sequence goes on with the block after its last one, if that is free. Otherwise it opens a run: as long as all that
    it holds, ``longest`` blocks at most, in a stretch of the lowest class that has room for it. What it doesn't use of
    the run at once stays *claimed*, right after its last block: others look elsewhere. A claim keeps nothing from
    anybody. Before any cached block is evicted all claimed ones are taken, the oldest claim first; and it ends when the
    block before it is no longer used.

    To find a run takes no longer than there are classes, whatever the number of blocks.
    """

    def __init__(self, num_blocks: int, longest: int) -> None:
        self._longest = longest
        self._count = 0
        self._past: dict[int, int] = {}
        """Of open stretches, by their first block."""
        self._first: dict[int, int] = {}
        """And the other way round."""
        self._classes: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_blocks.bit_length())]
        """First blocks of open stretches; those opened last are last."""
        self._claims: OrderedDict[int, int] = OrderedDict()
        """Like ``_past``, of claimed stretches. None of them touches another stretch's end."""
        self._open(0, num_blocks)
        self._count = num_blocks

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for stretches in (self._past, self._claims):
            for first, past in stretches.items():
                yield from range(first, past)

    def add(self, block: int) -> None:
        """A block that was used or cached is free now."""
        self._open(block, block + 1)
        self._count += 1

    def rest(self, block: int) -> None:
        """A block that was used is cached now: whoever used it won't go on after it."""
        past = self._claims.pop(block + 1, None)
        if past is not None:
            self._open(block + 1, past)

    def take(self, count: int, table: Sequence[int]) -> list[int]:
        """Take ``count`` blocks, which there must be, to go on ``table``."""
        taken: list[int] = []
        held = len(table) + count
        first = table[-1] + 1 if table else -1
        while len(taken) < count:
            missing = count - len(taken)
            length = max(missing, min(held, self._longest))
            if first in self._claims:
                past = length_end = self._claims.pop(first)
            else:
                if first not in self._past:
                    first = self._choose(length)
                past = self._close(first)
                length_end = first + length
            end = min(first + missing, past)
            taken += range(first, end)
            claimed = min(max(end, length_end), past)
            if end < claimed:
                self._claims[end] = claimed
            if claimed < past:
                self._open(claimed, past)
            first = end
        self._count -= count
        return taken

    def in_order(self, blocks: list[int]) -> list[int]:
        """In which order to use blocks that come from elsewhere."""
        return sorted(blocks)

    def check_integrity(self, used: Iterable[int]) -> None:
        """Raise IntegrityError unless all stretches are as long as can be and every claim follows a used block."""
        users = {*used}
        for first, past in self._past.items():
            if not first < past or self._first.get(past) != first or first not in self._classes[_class(past - first)]:
                raise IntegrityError(f"the open stretch [{first}, {past}) can't be found")
            if past in self._past or past in self._claims:
                raise IntegrityError(f"the open stretch [{first}, {past}) ends before free blocks")
        if not len(self._past) == len(self._first) == sum(map(len, self._classes)):
            raise IntegrityError("there are traces of open stretches that are gone")
        for first, past in self._claims.items():
            if not first < past or first - 1 not in users:
                raise IntegrityError(f"nobody can go on with the claimed stretch [{first}, {past})")
        if self._count != sum(1 for _ in self):
            raise IntegrityError(f"{self._count} blocks are counted as free; there are {[*self]}")

    def _choose(self, length: int) -> int:
        """The first block of the open stretch in which to begin a run; one is made of a claim if there is none."""
        least = (length - 1).bit_length()
        for index in (*range(least, len(self._classes)), *range(min(least, len(self._classes)) - 1, -1, -1)):
            if self._classes[index]:
                newest: int = next(reversed(self._classes[index]))
                return newest
        first = next(iter(self._claims))
        self._open(first, self._claims.pop(first))
        return first

    def _open(self, first: int, past: int) -> None:
        """Free blocks that nobody has a claim to, joined with those beside them."""
        if past in self._claims:
            past = self._claims.pop(past)  # the block before it, which is free now, was its user's
        if past in self._past:
            past = self._close(past)
        if first in self._first:
            first = self._first[first]
            self._close(first)
        self._past[first] = past
        self._first[past] = first
        self._classes[_class(past - first)][first] = None

    def _close(self, first: int) -> int:
        past = self._past.pop(first)
        del self._first[past]
        del self._classes[_class(past - first)][first]
        return past


def _class(length: int) -> int:
    return length.bit_length() - 1
