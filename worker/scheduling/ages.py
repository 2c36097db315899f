"""How long blocks live in a pool, lie idle in it and wait to be hit again: figures for operators.

Pure: the time is what the caller says. A figure costs one search among a few bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from worker.scheduling.block import Block

BOUNDS_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)


class Spread:
    """Durations, counted by their length. Written by one thread, read by any."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """How many were as long as each of BOUNDS_S at most, and longer than the one before; at last the longest."""
        self.seconds = 0.0
        """All of them together."""

    def add(self, seconds: float) -> None:
        """There was one more."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds


class Ages:
    """What becomes of offered blocks, and when."""

    def __init__(self) -> None:
        self.now = 0.0
        """In seconds, from any beginning; the caller's to set. It never goes back."""
        self.life = Spread()
        """From being offered to being evicted."""
        self.idle = Spread()
        """From being given back by the last user to being evicted."""
        self.gap = Spread()
        """From being given back by the last user to the next hit."""

    def offered(self, block: Block) -> None:
        """Others may find it from now on."""
        block.offered_at = self.now

    def rested(self, block: Block) -> None:
        """Its last user has given it back, and it stays cached."""
        block.idle_since = self.now

    def reused(self, block: Block) -> None:
        """It was cached, and somebody uses it again."""
        self.gap.add(self.now - block.idle_since)

    def evicted(self, block: Block) -> None:
        """It was cached, and had to go."""
        self.life.add(self.now - block.offered_at)
        self.idle.add(self.now - block.idle_since)
