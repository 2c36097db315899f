"""Which workers get no jobs for a while, because the last ones failed there. Pure: the clock is the caller's.

::

    closed --5 failures in a row--> open --10 s--> half-open --its one trial job has a token--> closed
                                      ^                |
                                      +---- it fails --+

A circuit belongs to one life of a worker. That a worker is gone is no failure: its lease says it, to everybody. A trial
has succeeded with its first token: a long answer does not keep others from a worker that works again. What fails behind
that opens the circuit at once. Trials are numbered: the end of one that is over already says nothing of the next.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

FAILURES: Final = 5
"""In a row, after which a worker gets no jobs."""
OPEN_S: Final = 10.0
"""For so long; then it gets one at a time until one has its first token."""
MAX_CIRCUITS: Final = 1024
"""Workers whose last job failed. What failed longest ago is forgotten."""


@dataclass(slots=True)
class Circuit:
    """Of a worker whose last job failed."""

    failures: int = 0
    """In a row."""
    opened_at: float | None = None
    trial: int = 0
    """Number of the job there that is to tell whether it works again; 0: none."""


class Breaker:
    """What one gateway has seen of the jobs that it gave to workers, by incarnation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._circuits: OrderedDict[str, Circuit] = OrderedDict()
        self._trials = 0

    @property
    def open(self) -> int:
        """Workers that get no jobs now, or one at a time."""
        return len(self.circuits)

    @property
    def circuits(self) -> dict[str, str]:
        """Incarnations of the workers that get no jobs now ("open"), or one at a time ("half-open")."""
        now = self._clock()
        return {
            incarnation: "open" if now - each.opened_at < OPEN_S else "half-open"
            for incarnation, each in tuple(self._circuits.items())
            if each.opened_at is not None
        }

    def failed(self, incarnation: str) -> None:
        """A job failed there, by the worker's fault as far as anybody can tell."""
        circuit = self._circuits.pop(incarnation, None) or Circuit()
        self._circuits[incarnation] = circuit
        circuit.failures += 1
        if circuit.failures >= FAILURES:
            circuit.opened_at = self._clock()
        while len(self._circuits) > MAX_CIRCUITS:
            self._circuits.popitem(last=False)

    def succeeded(self, incarnation: str) -> None:
        """A job ended well there."""
        self._circuits.pop(incarnation, None)

    def began(self, incarnation: str, trial: int) -> None:
        """The first token of that trial has been committed there: the worker gets jobs again."""
        circuit = self._circuits.get(incarnation)
        if circuit is not None and trial and circuit.trial == trial:
            circuit.failures, circuit.opened_at, circuit.trial = FAILURES - 1, None, 0

    def keep(self, live: Collection[str]) -> None:
        """Forgets all other lives of workers: they are over."""
        for incarnation in [each for each in self._circuits if each not in live]:
            del self._circuits[incarnation]

    def refused(self, able: Collection[str], *, trials: bool = True) -> dict[str, str]:
        """Of the workers that could take a job, those that should not, with the reason: never all of them. `trials`:
        whether the job may be one that tells whether a worker works again."""
        if not self._circuits:
            return {}
        reasons = {each: reason for each in able if (reason := self._reason(each, trials=trials))}
        return reasons if len(reasons) < len(able) else {}

    def begin(self, incarnation: str) -> int:
        """A job is about to be sent there: its number if it is a trial, which must be released when it is over; else
        0."""
        circuit = self._circuits.get(incarnation)
        if circuit is None or circuit.opened_at is None or circuit.trial:
            return 0
        self._trials += 1
        circuit.trial = self._trials
        return circuit.trial

    def release(self, incarnation: str, trial: int) -> None:
        """That trial is over, with whatever outcome. May be repeated."""
        circuit = self._circuits.get(incarnation)
        if circuit is not None and circuit.trial == trial:
            circuit.trial = 0

    def _reason(self, incarnation: str, *, trials: bool) -> str:
        """Empty: none."""
        circuit = self._circuits.get(incarnation)
        if circuit is None or circuit.opened_at is None:
            return ""
        if self._clock() - circuit.opened_at < OPEN_S or not trials:
            return f"its last {circuit.failures} jobs failed"
        return f"its last {circuit.failures} jobs failed, and it is on trial" if circuit.trial else ""
