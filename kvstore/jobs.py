"""Jobs: submitted by gateways, claimed and committed by workers, ended by whoever has a reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.v1 import inference_pb2, job_pb2
    from redis.asyncio import Redis

    from kvstore.client import Broker

RETENTION_S = 600
"""How long an ended job and its log stay readable, and its request id taken."""


class Submitted(Enum):
    """What ``submit`` did."""

    ACCEPTED = "accepted"
    ATTACHED = "attached"
    """The job was there already: the caller now gets its deliveries, and finds the earlier ones in the log."""


class Commit(Enum):
    """What became of one delivery."""

    WRITTEN = "written"
    DUPLICATE = "duplicate"
    """Written before, by the same attempt: a retry after a lost reply."""
    FENCED = "fenced"
    """The job has ended, or belongs to another attempt: drop the sequence."""


class Finished(Enum):
    """What ``finish`` did."""

    ENDED = "ended"
    ALREADY = "already"
    """It had ended before."""
    UNKNOWN = "unknown"
    """No such job, or its retention is over."""
    FENCED = "fenced"
    """It is not the attempt, or not the gateway's, that was expected."""


class JobState(str, Enum):
    """Where a job is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a worker's stream."""

    entry_id: str
    request_id: str
    """Empty when the entry was not written by ``submit``; ``claim`` drops such entries."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this incarnation now owns."""

    job: job_pb2.Job
    attempt: int
    remaining_ms: int | None
    """Until the deadline, by the broker's clock; 0 when it has passed, None when there is none."""
    queued_ms: int
    """From submission to the (first) claim of this attempt."""
    gateway: str
    entry_id: str
    """Tells a job claimed again (a repeated claim, same entry) from one submitted anew under the same request id."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job's hash, without its payload."""

    request_id: str
    state: JobState
    attempt: int
    owner: str
    worker: str
    worker_incarnation: str
    gateway: str
    next: dict[int, int]
    """Next token index by choice, which is also how many tokens are committed."""
    prompt_tokens: int
    cached_tokens: int
    finish: int | None
    """inference_pb2.FinishReason once it has ended."""
    submitted_ms: int
    remaining_ms: int | None


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One worker's stream."""

    worker: str
    stream: str
    undelivered: int
    pending: int
    oldest_age_ms: int


class Jobs:
    """All that happens to a job."""

    def __init__(self, broker: Broker, *, retention_s: float = RETENTION_S) -> None:
        self._broker = broker
        self._retention_s = retention_s

    async def submit(
        self,
        job: job_pb2.Job,
        *,
        digest: bytes,
        worker: str,
        worker_incarnation: str,
        gateway: str,
        deadline_ms: int | None,
        max_queue: int,
    ) -> Submitted:
        """Hands a job to a worker, once.

        ``digest`` names the client's payload; ``deadline_ms`` is the time left, in milliseconds. Raises
        RequestIdTaken, QueueFull, WorkerGone, BrokerFull (nothing was written), BrokerUnreachable (unknown: cancel
        it, or submit it again).
        """
        raise NotImplementedError

    async def next_entries(
        self, blocking_client: Redis, worker: str, incarnation: str, count: int, block_ms: int
    ) -> list[Entry]:
        """Up to ``count`` entries of the worker's stream; empty after ``block_ms`` without any.

        After a failed or cancelled read (and at first) the consumer's own pending entries come first, as a reply that
        was lost may have carried them: claims of jobs that already run are then repeated. Raises BrokerError.
        """
        raise NotImplementedError

    async def claim(self, worker: str, incarnation: str, entries: Sequence[Entry]) -> list[Claim]:
        """Makes this incarnation the owner of the entries' jobs, in one call.

        Entries whose job has ended or vanished are removed and left out. Claiming again what one owns gives the same
        claim. Empty when another incarnation holds the worker's lease.
        """
        raise NotImplementedError

    async def commit(self, worker: str, incarnation: str, deliveries: Sequence[job_pb2.Delivery]) -> list[Commit]:
        """Writes what a step produced, in one call; one result for each delivery, in order.

        May be repeated freely. Raises CommitGap when chunks do not follow on what is committed (all others are
        written), ValueError for a chunk with neither tokens nor finish.
        """
        raise NotImplementedError

    async def finish(
        self,
        request_id: str,
        *,
        finish: inference_pb2.FinishReason,
        failure: job_pb2.Failure,
        error: str,
        expect_attempt: int | None = None,
        expect_gateway: str | None = None,
    ) -> Finished:
        """Ends a job from outside: writes its terminal delivery (no usage, start 0) and rings gateway and owner."""
        raise NotImplementedError

    async def cancel(self, request_id: str, *, gateway: str | None = None) -> Finished:
        """``finish`` with CANCELLED; with ``gateway``, only while the job is that gateway's."""
        raise NotImplementedError

    async def get(self, request_id: str) -> JobRecord | None:
        """None when unknown."""
        raise NotImplementedError

    async def end_orphans(self) -> list[str]:
        """Ends the jobs of dead workers and of replaced incarnations; their request ids. Any gateway may run it at
        any time."""
        raise NotImplementedError

    async def queues(self) -> list[QueueInfo]:
        """All workers' streams, by worker id. Two round trips."""
        raise NotImplementedError
