"""Where a job goes: to the worker with the least charged tokens, and ties at random.

``route`` is a pure function of what is known, so that a decision can be explained and replayed. ``Pending`` keeps the
charges of decisions that a reading of Redis may not show yet: without it every job of a burst would see the same idle
worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

READY: Final = "ready"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live worker of the wanted model. `tokens`: charged to it and not yet refunded, as Redis had it; 0 where only
    one worker can be chosen, for then nobody asked."""

    worker: str
    incarnation: str
    state: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Considered:
    """A candidate as the decision saw it. `cost` is in tokens; `verdict`: chosen, costlier, tied, or why not at all."""

    worker: str
    incarnation: str
    cost: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice, and every candidate with its reason. `chosen` is None when no candidate takes jobs."""

    chosen: Considered | None
    considered: tuple[Considered, ...]


def route(
    candidates: Sequence[Candidate], *, pending: Mapping[str, int], refused: Mapping[str, str], rng: random.Random
) -> Decision:
    """Least charged tokens among ready candidates.

    `pending`: tokens charged by incarnation on top of what Redis shows. `refused`: incarnation to reason, for workers
    that have just declined this job.
    """
    costs = {each.incarnation: max(0, each.tokens) + pending.get(each.incarnation, 0) for each in candidates}
    able = [each for each in candidates if each.state == READY and each.incarnation not in refused]
    least = min((costs[each.incarnation] for each in able), default=0)
    tied = [each for each in able if costs[each.incarnation] == least]
    winner = rng.choice(tied) if tied else None

    def verdict(each: Candidate) -> str:
        if each.incarnation in refused:
            return refused[each.incarnation]
        if each.state != READY:
            return f"is {each.state}"
        if winner is not None and each.incarnation == winner.incarnation:
            return "chosen"
        return "tied" if costs[each.incarnation] == least else "costlier"

    considered = tuple(
        Considered(each.worker, each.incarnation, costs[each.incarnation], verdict(each)) for each in candidates
    )
    return Decision(next((each for each in considered if each.verdict == "chosen"), None), considered)


@dataclass(slots=True, eq=False)
class Charge:
    """Tokens of one decision. `settled_at` is None until its submission has answered."""

    incarnation: str
    tokens: int
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

    def unseen_by(self, reading: int) -> Counter[str]:
        """Tokens by incarnation that the reading may not show."""
        tokens: Counter[str] = Counter()
        for each in self._charges:
            if each.settled_at is None or each.settled_at >= reading:
                tokens[each.incarnation] += each.tokens
        return tokens

    def charge(self, incarnation: str, tokens: int) -> Charge:
        """Adds the charge of a decision. It counts until ``settle``."""
        entry = Charge(incarnation, tokens)
        self._charges.append(entry)
        return entry

    def settle(self, entry: Charge, *, applied: bool) -> None:
        """The submission answered. `applied` false: the worker declined, so Redis will never show the charge."""
        entry.settled_at = self._now
        if not applied or not self._readings:
            self._charges.remove(entry)

    def __len__(self) -> int:
        return len(self._charges)
