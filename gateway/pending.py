"""What this gateway has decided and Redis may not show yet: charges, and prefixes that are on their way to a worker.

Without the charges every job of a burst would see the same idle worker. Without the prefixes a burst of equal prompts
would find that nobody holds them, and spread over workers that all compute the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.registry import Load

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from kvstore.block_hash import BlockHash

MOST_PROMISED: Final = 1 << 20
"""Block hashes in all promises together, in some 200 MB: a thousand callers who each wait with 16,000 tokens."""


@dataclass(slots=True, eq=False)
class Charge:
    """The charge of one decision. `settled_at` is None until its submission has answered."""

    incarnation: str
    load: Load
    settled_at: int | None = None


class Pending:
    """Charges that a given reading of Redis may lack. Time here is a counter of events, not a clock.

    A charge counts for a reading unless it was settled (its submission answered) before that reading began. A charge
    that Redis already shows may be counted twice for a moment; it is never missed.
    """

    def __init__(self) -> None:
        self._now = 0
        self._readings: set[int] = set()
        self._charges: list[Charge] = []

    def begin_reading(self) -> int:
        """Names a reading that is about to start. Every reading must be ended."""
        self._now += 1
        self._readings.add(self._now)
        return self._now

    def end_reading(self, reading: int) -> None:
        """Forgets the reading, and the charges that no open or later reading can lack."""
        self._readings.discard(reading)
        horizon = min(self._readings, default=self._now + 1)
        self._charges = [each for each in self._charges if each.settled_at is None or each.settled_at >= horizon]

    def unseen_by(self, reading: int) -> dict[str, Load]:
        """By incarnation, what the reading may not show."""
        loads: dict[str, Load] = {}
        for each in self._charges:
            if each.settled_at is None or each.settled_at >= reading:
                loads[each.incarnation] = added(loads.get(each.incarnation, Load()), each.load)
        return loads

    def charge(self, incarnation: str, load: Load) -> Charge:
        """Adds the charge of a decision. It counts until ``settle``."""
        entry = Charge(incarnation, load)
        self._charges.append(entry)
        return entry

    def settle(self, entry: Charge, *, applied: bool) -> None:
        """The submission answered. `applied` false: the worker declined, so Redis will never show the charge."""
        entry.settled_at = self._now
        if not applied or not self._readings:
            self._charges.remove(entry)

    def __len__(self) -> int:
        return len(self._charges)


def added(one: Load, other: Load) -> Load:
    """Two loads of a worker together."""
    return Load(
        jobs=one.jobs + other.jobs,
        tokens=one.tokens + other.tokens,
        prefill=one.prefill + other.prefill,
        sequences=one.sequences + other.sequences,
    )


@dataclass(slots=True, eq=False)
class Promise:
    """A prompt's full blocks, which a worker will hold once it has computed them."""

    incarnation: str
    hashes: Sequence[BlockHash]


class Promises:
    """Prefixes that workers will hold, because a job that has them is in their queue.

    A promise stands from the decision to the job's first output: the same script call that publishes that has put its
    blocks in the index, which from then on knows best. There is no other limit in time, as a job that waits long is a
    promise for as long; but the number of hashes is bounded, and the oldest promises go first.
    """

    def __init__(self, most: int = MOST_PROMISED) -> None:
        self._most = most
        self._size = 0
        self._promises: dict[Promise, None] = {}
        self._hashes: defaultdict[str, Counter[BlockHash]] = defaultdict(Counter)
        self._number: Counter[str] = Counter()
        """Of promises, by incarnation."""

    @property
    def incarnations(self) -> Container[str]:
        """Of the workers that something is promised to."""
        return self._hashes

    def make(self, incarnation: str, hashes: Sequence[BlockHash]) -> Promise:
        """The worker will hold these, all full blocks of a prompt in order. To be forgotten by the caller."""
        promise = Promise(incarnation, hashes)
        if hashes:
            self._promises[promise] = None
            self._size += len(hashes)
            self._hashes[incarnation].update(hashes)
            self._number[incarnation] += 1
            while self._size > self._most:
                self.forget(next(iter(self._promises)))
        return promise

    def forget(self, promise: Promise) -> None:
        """The index knows better by now, or the worker will not hold them. May be repeated."""
        if promise not in self._promises:
            return
        del self._promises[promise]
        self._size -= len(promise.hashes)
        self._number[promise.incarnation] -= 1
        if not self._number[promise.incarnation]:
            del self._number[promise.incarnation], self._hashes[promise.incarnation]
            return
        counts = self._hashes[promise.incarnation]
        for each in promise.hashes:
            if counts[each] > 1:
                counts[each] -= 1
            else:
                del counts[each]

    def held(self, incarnation: str, hashes: Sequence[BlockHash]) -> int:
        """How many of a prompt's first blocks the worker will hold. What is promised is closed under prefix, like what
        is held, so halving the interval finds it."""
        counts = self._hashes.get(incarnation)
        if not counts or not hashes or hashes[0] not in counts:
            return 0
        least, most = 1, len(hashes)
        while least < most:
            middle = (least + most + 1) // 2
            if hashes[middle - 1] in counts:
                least = middle
            else:
                most = middle - 1
        return least

    def __len__(self) -> int:
        return len(self._promises)
