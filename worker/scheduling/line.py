"""Sequences in the order of their standing, and what they tell each other about the prefixes that they compute."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from worker.scheduling.block import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.block_hash import BlockHash
    from worker.sequence import Sequence

_standing = attrgetter("standing")


class Line:
    """A line of sequences, best standing first. No two have the same, and it doesn't change while they are in it."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    def __repr__(self) -> str:
        return f"Line({self._sequences})"

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where it belongs."""
        insort(self._sequences, sequence, key=_standing)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Raises IntegrityError when it isn't there."""
        index = bisect_left(self._sequences, sequence.standing, key=_standing)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise IntegrityError(f"{sequence} is not in its line")
        del self._sequences[index]


class Announcements:
    """The full blocks that running sequences are going to compute and offer, by hash.

    Of equal prefixes that arrive together only one is computed: who finds its next block announced by a sequence with a
    better standing waits for it. It would not be sooner alone. For one with a worse standing nobody waits: that one may
    have to wait itself, for all that come between the two.
    """

    def __init__(self) -> None:
        self._announcers: dict[BlockHash, list[Sequence]] = {}

    def to_await(self, hash_: BlockHash, sequence: Sequence) -> bool:
        """Whether a sequence had better wait for a block with this hash than compute it."""
        return any(each.standing < sequence.standing for each in self._announcers.get(hash_, ()))

    def announce(self, sequence: Sequence, first: int, end: int) -> None:
        """A sequence is going to compute its blocks from ``first`` to before ``end``."""
        for hash_ in sequence.hash_blocks(end)[first:]:
            self._announcers.setdefault(hash_, []).append(sequence)
        sequence.announced = end if first < end else 0

    def drop(self, sequence: Sequence, first: int, end: int) -> None:
        """A sequence has computed, or won't compute, its announced blocks from ``first`` to before ``end``."""
        for hash_ in sequence.hashes[first : min(end, sequence.announced)]:
            announcers = self._announcers[hash_]
            announcers.remove(sequence)
            if not announcers:
                del self._announcers[hash_]

    def withdraw(self, sequence: Sequence) -> None:
        """A sequence will offer nothing of what it has announced and not computed."""
        self.drop(sequence, sequence.num_computed // sequence.block_size, sequence.announced)
        sequence.announced = 0

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise IntegrityError unless just these sequences' uncomputed blocks are announced."""
        expected = Announcements()
        for sequence in running:
            first, announced = sequence.num_computed // sequence.block_size, sequence.announced
            expected.announce(sequence, first, max(first, announced))
            sequence.announced = announced
        if _as_sets(expected._announcers) != _as_sets(self._announcers):
            raise IntegrityError("what is announced differs from what running sequences are going to compute")


def _as_sets(announcers: dict[BlockHash, list[Sequence]]) -> dict[BlockHash, set[Sequence]]:
    return {hash_: {*sequences} for hash_, sequences in announcers.items()}
