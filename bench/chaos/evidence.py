"""All that the checker is given, as plain data: it can be made up, changed and compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.chaos.history import Request


@dataclass(frozen=True, slots=True)
class Key:
    """A name in the broker."""

    kind: str
    """Its type: hash, stream, zset, set, string."""
    ttl_ms: int | None
    """None: it never expires."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A worker's stream of jobs."""

    length: int
    pending: int


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What a job's hash says."""

    state: str
    attempt: int
    choices: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A delivery in a token log. Attempt 0: written from outside, ends all choices that are open."""

    attempt: int
    choice: int
    start: int
    tokens: tuple[int, ...] = ()
    finish: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The broker's side of the end of a run. Names are without the namespace's prefix."""

    keys: Mapping[str, Key] = field(default_factory=dict)
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """By worker."""
    jobs: Mapping[str, JobFacts] = field(default_factory=dict)
    """By request id."""
    logs: Mapping[str, tuple[LogEntry, ...]] = field(default_factory=dict)
    """By request id."""
    loads: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What is still charged, by ``worker:incarnation``."""
    ledger: Mapping[str, int] = field(default_factory=dict)
    """Counts by name, those of finished ones without faults too; empty where the broker keeps none."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A live worker's blocks and sequences, once it is idle."""

    worker: str
    total: int
    free: int
    cached: int
    used: int
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Scrape:
    """A process's metrics at one moment, by name and labels as they are shown."""

    gauges: Mapping[str, float] = field(default_factory=dict)
    """Those that are 0 in an idle process."""
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    tokens: tuple[int, ...]
    text: str
    finish: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a payload is answered with when nothing fails."""

    choices: tuple[Choice, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Outage:
    """Nobody could be served: no worker was there, or the broker was not. By the history's clock, in seconds."""

    begin: float
    end: float


AMPLE_S: Final = 60.0
LATE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What is right in this run, where that is not the same in all."""

    lossless: bool = True
    """An accepted request may fail only by its own deadline: a schedule that leaves one worker alone, and the broker
    away for seconds, is no excuse for anything; ``Run.outages`` are. False: by any error."""
    ample_s: float = AMPLE_S
    """A deadline of so long is far longer than any fault: who meets it was as good as lost, or never taken."""
    broker_loses: bool = False
    """A fault made the broker lose what it had answered for: only of requests that ended well all is in their logs."""
    late_s: float = LATE_S
    """Beyond its deadline a request may take so long to end."""
    cancel_s: float = LATE_S
    """For so long after a Cancel was answered tokens may still be on their way."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids to text. None: text is only compared with that of the run without faults."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run, with all that is known about it."""

    requests: Mapping[str, Request]
    oracle: Mapping[str, Answer]
    """By digest of the payload, from a run without faults."""
    broker: Snapshot = field(default_factory=Snapshot)
    pools: tuple[Pool, ...] = ()
    scrapes: Mapping[str, tuple[Scrape, ...]] = field(default_factory=dict)
    """In order, by life of a process: counters begin anew with each."""
    outages: tuple[Outage, ...] = ()
    """Of what was done to the fleet: see ``outages``."""
