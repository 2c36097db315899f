"""Jobs that nobody will run: those of dead workers, those that a replaced incarnation had read, and those that a
draining worker has not read. They are found here, and moved to workers that will run them, or given up. Found too is
what a draining worker has read and said nothing of yet: that is moved where it can be, else it stays.

::

    Jobs.orphans() --> a gateway reads what can be moved, and routes it --> Jobs.rehome(orphan, target)

Orphans are looked at in order, a hundred of each worker at a time, and come without their prompts: those for which
there is no worker are met again and again. Any gateway may do this at any time, next to others: what is found only says
where to look, ``rehome.lua`` decides.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from kvstore.endings import end_damaged
from kvstore.errors import BrokerAuth, BrokerError, BrokerUnreachable
from kvstore.keys import GROUP
from kvstore.limits import MAX_CHOICES, MAX_JOB_BYTES
from kvstore.outage import Outage
from kvstore.records import (
    MOST_ATTEMPTS,
    MOST_TOKENS,
    JobState,
    number,
    parse_job,
    parse_positions,
    require_choices,
)
from kvstore.worker_info import DRAINING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Broker
    from octavo.v1 import job_pb2

logger = logging.getLogger(__name__)

MAX_DEATHS: Final = 3
"""Workers in a row that die of a job and get no token of it: then it is taken for the cause."""
MAX_DEATHS_TELLING: Final = 4
"""The same where one of the last three got a few: tokens speak for a job, but some come before what kills."""
MAX_FRUITLESS: Final = 10
"""Workers in a row that run a job and get no token of it, however they end."""
ALONE_DEATHS: Final = 2
"""From so many deaths on a suspect goes where no other one is."""

DRAINS: Final = "is draining"

_BATCH: Final = 100
"""Entries that one script call looks at, for some 10 microseconds of the server's time each."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A job that nobody will run, or that its worker need not, as it was found."""

    worker: str
    """In whose stream it is."""
    incarnation: str
    """Life of that worker that it was meant for, or that had claimed it."""
    why: str
    """What became of the worker: "died", "left", "broke", "was restarted", "is draining"."""
    entry_id: str
    request_id: str
    model: str
    prompt_tokens: int
    longest: int
    """Tokens that its worker's context needs room for: of the prompt, and the longest answer that was asked for."""
    attempt: int
    """How often it has been claimed so far."""
    next: tuple[int, ...]
    """Of each choice: the next token index, which is also how many tokens are committed."""
    ended: frozenset[int]
    """Choices that have ended: nothing of them is to be computed."""
    fingerprint: str
    """Of the model that its tokens were computed with, or were to be; empty: unknown."""
    deaths: int
    """Workers in a row that died before they got a few tokens of it, this one included. From 1 on it is a suspect."""
    fruitless: int
    """Workers in a row that ran it and got no token, this one included."""
    state: JobState
    seen_ms: int
    """When this was found, by the broker's clock."""
    waited_ms: int
    """For how long it has had nobody to run it."""

    @property
    def kept(self) -> bool:
        """Its worker runs it, and drains; it has said nothing of it so far."""
        return self.why == DRAINS and self.state is JobState.RUNNING

    @property
    def doomed(self) -> bool:
        """No worker is to run it again."""
        return self._killed or self.fruitless >= MAX_FRUITLESS

    @property
    def alone(self) -> bool:
        """No other suspect is to be where it is."""
        return self.deaths >= ALONE_DEATHS

    @property
    def verdict(self) -> str:
        """Why that is, for its caller."""
        if self._killed:
            return f"{self.deaths} workers died while they ran it"
        return f"{self.fruitless} workers in a row ran it, and none got a token of it"

    @property
    def _killed(self) -> bool:
        silent = self.fruitless >= MAX_DEATHS
        return self.deaths >= (MAX_DEATHS if silent else MAX_DEATHS_TELLING)


@dataclass(frozen=True, slots=True)
class Target:
    """A worker that is to run an orphan."""

    worker: str
    incarnation: str
    prefill: int
    """Tokens of the prompt, and of what the answers have already, that it will compute: charged to its load until its
    first delivery."""
    predicted: int
    """Tokens of the prompt that are expected in its cache."""


class Rehomed(Enum):
    """What ``rehome`` did."""

    MOVED = "moved"
    ENDED = "ended"
    """There was no target for too long: it ended with FAILURE_UNAVAILABLE."""
    DEAD = "dead"
    """It ended with FAILURE_DEAD, and is kept among the dead."""
    WAITING = "waiting"
    """There is no target yet, or that has a suspect and one of the two must be alone; it stays where it is."""
    STALE = "stale"
    """It is not as it was found (somebody else did it, or its worker is back), or the target is gone: look again."""


class Looks:
    """What one look leaves to the next."""

    def __init__(self) -> None:
        self.behind: dict[str, str] = {}
        """By worker: the entry that the next look goes on behind."""
        self._failing: dict[str, Outage] = {}

    def failed(self, worker: str, error: BrokerError) -> None:
        """Jobs of this worker are not looked after."""
        outage = self._failing.setdefault(worker, Outage(logger, f"looking after the jobs of worker {worker}"))
        outage.failed(error)

    def worked(self, worker: str) -> None:
        """They are."""
        if (outage := self._failing.pop(worker, None)) is not None:
            outage.worked()

    def only(self, workers: list[str]) -> None:
        """The others' jobs need not be looked after."""
        for worker in self.behind.keys() - workers:
            del self.behind[worker]
        for worker in self._failing.keys() - workers:
            self.worked(worker)


async def find(broker: Broker, looks: Looks, lease_ttl_ms: int, retention_ms: int) -> list[Orphan]:
    """See ``Jobs.orphans``. ``looks`` is kept up here."""
    found: list[Orphan] = []
    suspicious = await _suspicious(broker)
    looks.only(suspicious)
    for worker in suspicious:
        try:
            found += await _of_worker(broker, worker, looks.behind, lease_ttl_ms, retention_ms)
        except (BrokerUnreachable, BrokerAuth):
            raise
        except BrokerError as error:
            # Keys of a wrong type. The other workers' jobs must not wait for somebody to clean that up.
            broker.malformed += 1
            looks.failed(worker, error)
        else:
            looks.worked(worker)
    return found


async def _suspicious(broker: Broker) -> list[str]:
    """Workers whose streams may have orphans: those without a lease, those that drain, and those whose earlier lives
    are still consumers. Two round trips, however many workers."""
    keys = broker.keys
    workers = [name.decode(errors="replace") for name in await broker.call("ZRANGE", keys.workers, 0, -1)]
    commands: list[tuple[Any, ...]] = []
    for worker in workers:
        commands += [
            ("HMGET", keys.worker(worker), "incarnation", "state"),
            ("XINFO CONSUMERS", keys.jobs(worker), GROUP),
        ]
    replies = await broker.pipeline(commands)
    found: list[str] = []
    for worker, lease, consumers in zip(workers, replies[::2], replies[1::2], strict=True):
        # Errors are a lease of another type, which the script then tells, and a stream without a group.
        holder, state = (None, None) if isinstance(lease, BrokerError) else lease
        others = [] if isinstance(consumers, BrokerError) else [one for one in consumers if one["name"] != holder]
        if holder is None or state == DRAINING.encode() or others:
            found.append(worker)
    return found


async def _of_worker(
    broker: Broker, worker: str, looked: dict[str, str], lease_ttl_ms: int, retention_ms: int
) -> list[Orphan]:
    keys = broker.keys
    names = [keys.workers, keys.worker(worker), keys.jobs(worker), keys.orphaned(worker)]
    args = [GROUP, keys.prefix, worker, lease_ttl_ms, looked.get(worker, ""), _BATCH, MAX_CHOICES]
    now, behind, *told = await broker.script("orphans", names, args) or [0, b""]
    looked[worker] = behind.decode()
    found: list[Orphan] = []
    for head in told:
        try:
            found.append(_parse(worker, head, int(now)))
        except ValueError as error:
            request_id = head[1].decode(errors="replace")
            await end_damaged(broker, request_id, str(error), retention_ms=retention_ms)
    return found


def _parse(worker: str, head: Sequence[Any], now_ms: int) -> Orphan:
    """From what orphans.lua tells of a job. Raises ValueError when that isn't what we write."""
    entry_id, request_id, why, size, attempt, state, incarnation, fingerprint, model, *numbers = head
    prompt_tokens, charge, deaths, fruitless, waited_ms, choices, *positions = numbers
    if not size:
        raise ValueError("it has no payload")
    if size > MAX_JOB_BYTES:
        raise ValueError(f"its payload has {size} bytes, of {MAX_JOB_BYTES} at most")
    past, ended = parse_positions(positions, choices)
    prompt = number(prompt_tokens, MOST_TOKENS)
    return Orphan(
        worker=worker,
        incarnation=incarnation.decode(),
        why=why.decode(),
        entry_id=entry_id.decode(),
        request_id=request_id.decode(),
        model=model.decode(),
        prompt_tokens=prompt,
        longest=prompt + max(number(charge, MAX_CHOICES * MOST_TOKENS) - prompt, 0) // len(past),
        attempt=number(attempt, MOST_ATTEMPTS),
        next=past,
        ended=ended,
        fingerprint=fingerprint.decode(),
        deaths=number(deaths, MOST_ATTEMPTS),
        fruitless=number(fruitless, MOST_ATTEMPTS),
        state=JobState(state.decode()),
        seen_ms=now_ms,
        waited_ms=waited_ms,
    )


async def read(broker: Broker, orphan: Orphan, retention_ms: int) -> job_pb2.Job | None:
    """See ``Jobs.orphaned_job``."""
    entry, payload = await broker.call("HMGET", broker.keys.job(orphan.request_id), "entry", "payload")
    if entry != orphan.entry_id.encode() or payload is None:
        return None
    try:
        job = parse_job(payload, orphan.request_id)
        require_choices(job, orphan.next)
    except ValueError as error:
        await end_damaged(broker, orphan.request_id, str(error), retention_ms=retention_ms)
        return None
    return job
