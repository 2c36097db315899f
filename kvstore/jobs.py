"""Jobs: submitted by gateways, claimed and committed by workers, ended by whoever has a reason.

A job has one choice or several, each with a log position and an end of its own; it ends with the last of them.

Every write is one script call that may be repeated: submissions are known by request id, claims by owner, commits by
attempt and token index, finishes by the job's state. So each is retried after a lost reply, and none is done twice (but
see ``steal``).

::

    (none) --submit--> queued --claim--> running --commit of the last end----> ended --retention--> (none)
                          ^                 |                                    ^
                          +------ rehome ---+------- finish, rehome -------------+
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import claims, commits, endings, ledger, orphans, rehoming, stealing, submissions
from kvstore import queues as queues_module
from kvstore.entries import Entry, EntryReader
from kvstore.ledger import Ledger
from kvstore.orphans import Orphan, Rehomed, Target
from kvstore.queues import QueueInfo
from kvstore.records import (
    Attached,
    Claim,
    Commit,
    Committed,
    Finished,
    JobRecord,
    JobState,
    Submitted,
    charge,
)
from kvstore.registry import HELD_LEASES, LEASE_TTL_MS
from kvstore.rehoming import ORPHAN_WAIT_S
from kvstore.tenants import NO_QUOTA, Quota
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from kvstore.client import Broker
    from kvstore.prefix_index import HeldChange

__all__ = [
    "RETENTION_S",
    "Attached",
    "Claim",
    "Commit",
    "Committed",
    "Entry",
    "Finished",
    "JobRecord",
    "JobState",
    "Jobs",
    "Ledger",
    "Orphan",
    "QueueInfo",
    "Rehomed",
    "Submitted",
    "Target",
    "charge",
]

RETENTION_S = 600.0
"""How long an ended job and its log stay readable, and its request id taken."""


class Jobs:
    """All that happens to a job. Every method raises BrokerError; what else it raises is said there."""

    def __init__(
        self,
        broker: Broker,
        *,
        retention_s: float = RETENTION_S,
        lease_ttl_ms: int = LEASE_TTL_MS,
        orphan_wait_s: float = ORPHAN_WAIT_S,
    ) -> None:
        self._broker = broker
        self._retention_ms = int(retention_s * 1000)
        self._lease_ttl_ms = lease_ttl_ms
        self._held_ttl_ms = HELD_LEASES * lease_ttl_ms
        self._orphan_wait_ms = int(orphan_wait_s * 1000)
        self._reader = EntryReader(broker)
        self._looks = orphans.Looks()

    async def submit(
        self,
        job: job_pb2.Job,
        *,
        digest: bytes,
        worker: str,
        worker_incarnation: str,
        gateway: str,
        caller: str = "",
        deadline_ms: int | None,
        max_queue: int,
        prefill: int = 0,
        predicted: int = 0,
        route: bytes = b"",
        quota: Quota = NO_QUOTA,
    ) -> Submitted:
        """Hands a job to a worker, once.

        ``digest`` names the client's payload, ``caller`` its call (empty: one of its own); ``deadline_ms`` is the time
        left, in milliseconds. ``predicted`` tokens of the prompt are expected in the worker's cache, ``prefill`` are
        not and are charged to its load until the job's first delivery; ``route`` is the octavo.v1.RouteRecord of the
        decision, empty: none is kept; ``quota`` what its tenant may ask for. Raises RequestIdTaken, OverQuota,
        QueueFull, WorkerGone, BrokerFull (nothing was written), BrokerUnreachable (unknown: submit it again or cancel
        it) and ValueError for a job that no gateway should let through.
        """
        return await submissions.submit(
            self._broker,
            job,
            digest=digest,
            worker=worker,
            worker_incarnation=worker_incarnation,
            gateway=gateway,
            caller=caller,
            deadline_ms=deadline_ms,
            max_queue=max_queue,
            prefill=prefill,
            predicted=predicted,
            route=route,
            quota=quota,
        )

    async def attach(
        self, request_id: str, *, digest: bytes | None = None, gateway: str, caller: str = ""
    ) -> Attached | None:
        """Points the job of that id at this gateway, and at this call of a client; None if there is no such job.

        Works for one that has ended, while its log is kept, and whatever became of its worker. May be repeated. Raises
        RequestIdTaken when the job is another payload's than ``digest`` says; None is any payload.
        """
        return await submissions.attach(self._broker, request_id, digest, caller, gateway)

    async def inherit(self, request_id: str, *, leaver: str, heir: str, gateway: str) -> None:
        """Points a job at an earlier call, of this gateway: the ``heir`` waits for it still, where the name of the last
        call that asked for it begins as that of the ``leaver``. May be repeated."""
        await submissions.inherit(self._broker, request_id, leaver, heir, gateway)

    async def next_entries(
        self, blocking_client: Redis, worker: str, incarnation: str, count: int, block_ms: int
    ) -> list[Entry]:
        """Up to ``count`` entries of the worker's stream; empty after ``block_ms`` without any, or sooner.

        After a failed or cancelled read (and at first) the consumer's own pending entries come first, as a reply that
        was lost may have carried them: ``claim`` then repeats claims of jobs that already run, see ``Claim.entry_id``.
        """
        return await self._reader.read(blocking_client, worker, incarnation, count, block_ms)

    def read_again(self, worker: str, incarnation: str) -> None:
        """The next ``next_entries`` goes through all that is pending for it: the broker may have lost claims."""
        self._reader.again(worker, incarnation)

    async def claim(self, worker: str, incarnation: str, entries: Sequence[Entry]) -> list[Claim]:
        """Makes this incarnation the owner of the entries' jobs, in one call.

        Entries whose job has ended or vanished are left out. Jobs that no gateway can have written are ended: those
        longer than the worker's context has room for are not even read. Claiming again what one owns gives the same
        claim, with what is committed meanwhile. Empty when another incarnation holds the worker's lease.
        """
        return await claims.claim(self._broker, worker, incarnation, entries, retention_ms=self._retention_ms)

    async def commit(
        self,
        worker: str,
        incarnation: str,
        deliveries: Sequence[job_pb2.Delivery],
        held: HeldChange | None = None,
        entries: Sequence[str] = (),
    ) -> Committed:
        """Writes what steps produced, in one call (more only for megabytes); one result for each delivery, in order.

        ``held`` goes along: what the worker's pool began and ceased to offer. It may come alone; an empty change asks
        how many blocks the index has. ``entries`` says of each delivery by which entry its job was claimed: where an
        id was submitted anew, what its earlier job has said is refused. Empty: not known.
        Each delivery goes to its job's log and to its gateway's channel. A chunk with a finish ends its choice; the
        last choice to end ends the job, which leaves the stream and is refunded. May be repeated freely.

        Raises CommitGap when chunks do not follow on what is committed for their choice, or the job has no such choice
        (all others are written; commit them again for their results), ValueError for a chunk with neither tokens nor
        finish (nothing is written).
        """
        times = {"retention_ms": self._retention_ms, "held_ttl_ms": self._held_ttl_ms}
        return await commits.commit(
            self._broker, worker, incarnation, deliveries=deliveries, held=held, entries=entries, **times
        )

    async def steal(
        self,
        worker: str,
        incarnation: str,
        victim: str,
        *,
        prefill_s_per_token: float,
        place_s: float = 0.0,
        margin_s: float = 0.0,
        held: Sequence[tuple[str, int]] = (),
        max_look: int = stealing.MAX_LOOK,
    ) -> int | None:
        """Takes at most one job that worker ``victim`` has not read yet; how many it took.

        One of its first ``max_look`` unread jobs is taken, when ``margin_s`` and what this worker does not hold of it
        at ``prefill_s_per_token`` (above 0), behind whatever this worker is charged, are less than what the victim
        needs: by its own rate for the prompts charged before it and for what isn't cached of this one, and ``place_s``
        for each place that it lacks (and that this worker lacks). All of this is judged in the moment of the move.
        ``held``: entries that ``stealing.peek`` told, with the tokens that this worker has cached; of others it has
        none. The job comes by ``next_entries``, like any other, predicted to find what was held of it.

        None: these two cannot trade, see steal.lua. Each repetition after a lost reply may take one more, by the same
        measure. Raises ValueError for what is no time.
        """
        terms = {"prefill_s_per_token": prefill_s_per_token, "place_s": place_s, "margin_s": margin_s}
        return await stealing.steal(self._broker, worker, incarnation, victim, held=held, max_look=max_look, **terms)

    async def finish(
        self,
        request_id: str,
        *,
        finish: inference_pb2.FinishReason,
        failure: job_pb2.Failure,
        error: str,
        expect_attempt: int | None = None,
        expect_gateway: str | None = None,
        expect_caller: str | None = None,
    ) -> Finished:
        """Ends a job from outside, once, with all of its choices that are still open.

        Writes one last delivery (attempt 0, start 0, no usage: its reader completes it from ``get``) to the log and to
        the gateway's channel, and the request id to the owner's channel.
        """
        return await endings.finish(
            self._broker,
            request_id,
            retention_ms=self._retention_ms,
            finish=finish,
            failure=failure,
            error=error,
            expect_attempt=expect_attempt,
            expect_gateway=expect_gateway,
            expect_caller=expect_caller,
        )

    async def cancel(self, request_id: str, *, caller: str | None = None) -> Finished:
        """``finish`` with CANCELLED. With ``caller``, who has left, as abandoned: only while the name of the last call
        that asked for the job begins so, and not if it is detached."""
        return await self.finish(
            request_id, finish=inference_pb2.CANCELLED, failure=job_pb2.FAILURE_NONE, error="", expect_caller=caller
        )

    async def get(self, request_id: str) -> JobRecord | None:
        """None when there is no such job, when its retention is over, or when its hash is not as we write it: then it
        is ended."""
        (found,) = await self.several([request_id])
        return found

    async def several(self, request_ids: Sequence[str]) -> list[JobRecord | None]:
        """``get`` for each of them, in one round trip."""
        return await submissions.records(self._broker, request_ids, self._retention_ms)

    async def route(self, request_id: str) -> bytes:
        """The octavo.v1.RouteRecord that the job was submitted with; empty: none, or it is not kept any more."""
        return await submissions.route(self._broker, request_id)

    async def orphans(self) -> list[Orphan]:
        """Jobs that nobody will run: those of dead workers and of such as left, those that a replaced incarnation had
        read, and those that a draining worker has not read, or said nothing of. Of each worker a hundred or so; the
        next look goes on behind them. Clears up behind the dead, and ends jobs that are not as we write them.
        """
        return await orphans.find(self._broker, self._looks, self._lease_ttl_ms, self._retention_ms)

    async def orphaned_job(self, orphan: Orphan) -> job_pb2.Job | None:
        """What is to be run of an orphan. None: it isn't there any more, or was not as we write it, and is ended."""
        return await orphans.read(self._broker, orphan, self._retention_ms)

    async def rehome(self, orphan: Orphan, target: Target | None) -> Rehomed:
        """Moves an orphan into the stream of a worker that is alive and ready, once; see Rehomed for what else may
        become of it. One that is doomed ends, whatever the target; one without a target waits a while for one. What a
        draining worker has read is moved, or left to it. Its next attempt begins when the target claims it; whoever had
        it is refused from now on, and told on its channel.
        """
        times = {"lease_ttl_ms": self._lease_ttl_ms, "retention_ms": self._retention_ms}
        return await rehoming.rehome(self._broker, orphan, target, orphan_wait_ms=self._orphan_wait_ms, **times)

    async def ledger(self) -> Ledger:
        """What became of all jobs that were ever accepted, in one moment."""
        return await ledger.read(self._broker)

    async def queues(self) -> list[QueueInfo]:
        """All workers' streams, by worker id. Two round trips."""
        return await queues_module.queues(self._broker)
