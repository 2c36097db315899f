"""Jobs that nobody will run: those of dead workers, those that a replaced incarnation had read, and those that a
draining worker has not read. They are found here, and moved to workers that will run them, or given up. Found too is
what a draining worker has read and said nothing of yet: that is moved where it can be, else it stays.

::

    Jobs.orphans() --> a gateway routes each --> Jobs.rehome(orphan, target)

Any gateway may do this at any time, next to others: what is found only says where to look, ``rehome.lua`` decides.
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
from kvstore.records import MOST_ATTEMPTS, JobState, number, parse_job, parse_positions
from kvstore.worker_info import DRAINING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Broker
    from octavo.v1 import job_pb2

logger = logging.getLogger(__name__)

MAX_DEATHS: Final = 3
"""Workers that die while they run a job and get no token of it: then it is taken for the cause."""
MAX_ATTEMPTS: Final = 10
"""Workers that run a job, at most, whatever comes of it."""

DRAINS: Final = "is draining"

_BATCH: Final = 100
"""Entries that one script call looks at, for some 10 microseconds of the server's time each."""
_BATCH_BYTES: Final = 4 * 2**20
"""Of payloads that one call returns, about."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A job that nobody will run, or that its worker need not, as it was found."""

    worker: str
    """In whose stream it is."""
    incarnation: str
    """Life of that worker that it was meant for, or that had claimed it."""
    why: str
    """What became of the worker: "died", "left", "was restarted", "is draining"."""
    entry_id: str
    job: job_pb2.Job
    attempt: int
    """How often it has been claimed so far."""
    next: tuple[int, ...]
    """Of each choice: the next token index, which is also how many tokens are committed."""
    ended: frozenset[int]
    """Choices that have ended: nothing of them is to be computed."""
    fingerprint: str
    """Of the model that its tokens were computed with, or were to be; empty: unknown."""
    deaths: int
    """Workers in a row that died of it, this one included. From 1 on it is a suspect."""
    state: JobState
    seen_ms: int
    """When this was found, by the broker's clock."""

    @property
    def kept(self) -> bool:
        """Its worker runs it, and drains; it has said nothing of it so far."""
        return self.why == DRAINS and self.state is JobState.RUNNING

    @property
    def doomed(self) -> bool:
        """No worker is to run it again."""
        return self.deaths >= MAX_DEATHS or self.attempt >= MAX_ATTEMPTS

    @property
    def verdict(self) -> str:
        """Why that is, for its caller."""
        if self.deaths >= MAX_DEATHS:
            return f"{self.deaths} workers died while they ran it"
        return f"{self.attempt} workers ran it, and none came to its end"


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
    """There is no target yet, or that has a suspect already and this is one; it stays where it is."""
    STALE = "stale"
    """It is not as it was found (somebody else did it, or its worker is back), or the target is gone: look again."""


async def find(broker: Broker, *, lease_ttl_ms: int, retention_ms: int) -> list[Orphan]:
    """See ``Jobs.orphans``."""
    found: list[Orphan] = []
    for worker in await _suspicious(broker):
        try:
            found += await _of_worker(broker, worker, lease_ttl_ms, retention_ms)
        except (BrokerUnreachable, BrokerAuth):
            raise
        except BrokerError as error:
            # Keys of a wrong type. The other workers' jobs must not wait for somebody to clean that up.
            broker.malformed += 1
            logger.warning("jobs of worker %s are not looked after: %s", worker, error)
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


async def _of_worker(broker: Broker, worker: str, lease_ttl_ms: int, retention_ms: int) -> list[Orphan]:
    keys = broker.keys
    names = [keys.workers, keys.worker(worker), keys.jobs(worker)]
    args = [GROUP, keys.prefix, worker, lease_ttl_ms, _BATCH, _BATCH_BYTES, MAX_JOB_BYTES, MAX_CHOICES]
    now, why, *told = await broker.script("orphans", names, args) or [0, b""]
    found: list[Orphan] = []
    for head in told:
        try:
            found.append(_parse(worker, why.decode(), head, int(now)))
        except ValueError as error:
            request_id = head[1].decode(errors="replace")
            logger.warning("job %s ended: %s", request_id, error)
            await end_damaged(broker, request_id, str(error), retention_ms=retention_ms)
    return found


def _parse(worker: str, why: str, head: Sequence[Any], now_ms: int) -> Orphan:
    """From what orphans.lua tells of a job. Raises ValueError when that isn't what we write."""
    entry_id, request_id, payload, attempt, state, incarnation, fingerprint, deaths, choices, *positions = head
    job = parse_job(payload, request_id.decode())
    past, ended = parse_positions(positions, choices, job)
    return Orphan(
        worker=worker,
        incarnation=incarnation.decode(),
        why=why,
        entry_id=entry_id.decode(),
        job=job,
        attempt=number(attempt, MOST_ATTEMPTS),
        next=past,
        ended=ended,
        fingerprint=fingerprint.decode(),
        deaths=number(deaths, MOST_ATTEMPTS),
        state=JobState(state.decode()),
        seen_ms=now_ms,
    )
