"""Routes a job and submits it, trying another worker when one declines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.errors import STARTING, DeadlinePassed, NoWorker, Overloaded
from gateway.placing import Booking, Need, Placing, is_full
from gateway.prefixes import PromptHashes
from gateway.record import record_of
from kvstore.errors import BrokerFull, BrokerWrongType, QueueFull, SubmitError, WorkerGone
from kvstore.jobs import Submitted
from kvstore.registry import READY
from kvstore.tenants import NO_QUOTA, Quota
from kvstore.tracing import UNTRACED

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from gateway.models import Models, Served
    from gateway.pending import Promise
    from gateway.router import Decision
    from kvstore.jobs import Jobs
    from kvstore.registry import WorkerInfo
    from kvstore.tracing import Trace
    from octavo.v1 import job_pb2

NO_LIMIT: Final = 2**31 - 1
"""Of a queue that takes whatever comes."""
MAX_TRIES: Final = 8
"""Workers that one job is offered to."""
LEAST_RETRY_MS: Final = 100
MOST_RETRY_MS: Final = 30_000
"""What a caller that met full queues is told to wait, at least and at most."""


@dataclass(slots=True)
class Order:
    """What to submit. `remaining_s` tells, when asked, how many seconds the client still waits; None: for ever.
    `caller` names the client's call."""

    job: job_pb2.Job
    digest: bytes
    remaining_s: Callable[[], float | None]
    caller: str = ""
    quota: Quota = NO_QUOTA
    """What its tenant may ask for."""
    fingerprint: str = ""
    """Of the worker that ran it before, if one did: another of that kind goes on with the same bits."""
    same_kind: bool = False
    """Only such a one will do, if the fingerprint is known."""
    accepted: bool = False
    """The fleet has taken it before: neither full queues nor its tenant's limits are a reason to refuse it, nor is it
    charged to those again."""
    trace: Trace = UNTRACED
    """Of the call that it is for."""
    offered: bool = False
    """It is on its way to a worker, or there: false again once that is known to have failed."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A job that the broker has. `worker` is where it was sent; for one that was attached to, where it was then."""

    submitted: Submitted
    worker: str
    predicted: int = 0
    """Prompt tokens that were expected in the worker's cache."""
    incarnation: str = ""
    """Of the worker; empty: not known."""
    promise: Promise | None = None
    """To be given back with ``Dispatch.forget`` once the job has output, or has ended."""
    trial: int = 0
    """The number under which it is to tell whether the worker works again; 0: it is not."""
    fingerprint: str = ""
    """Of the model at the worker; empty: not known."""


class Dispatch:
    """Hands jobs to workers on behalf of one gateway."""

    def __init__(self, jobs: Jobs, models: Models, placing: Placing, *, gateway: str, max_queue: int) -> None:
        self._jobs = jobs
        self._models = models
        self._placing = placing
        self._gateway = gateway
        self._max_queue = max_queue

    async def attach(self, request_id: str, digest: bytes | None, caller: str) -> Sent | None:
        """To the job of that id, if there is one: it needs no worker that takes jobs, not even a live one. `digest`:
        None for any payload.

        Raises RequestIdTaken, BrokerError.
        """
        found = await self._jobs.attach(request_id, digest=digest, gateway=self._gateway, caller=caller)
        if found is None:
            return None
        return Sent(Submitted.ATTACHED, found.worker, found.predicted, fingerprint=found.fingerprint)

    async def submit(self, order: Order, served: Served) -> Sent:
        """Submits to the best worker that takes the job.

        Raises Overloaded, NoWorker, DeadlinePassed, RequestIdTaken, OverQuota, BrokerFull, and BrokerWrongType where no
        worker's keys let the job in: nothing was queued. Any other BrokerError: unknown if ``order.offered``, else
        nothing was queued either.
        """
        workers = able(served.workers, order)
        need = Need(order.job, PromptHashes(order.job))
        gone: set[str] = set()
        full: QueueFull | None = None
        junk: BrokerWrongType | None = None
        wait_s = 0.0
        for _ in range(MAX_TRIES):
            began = time.monotonic()
            offer = await self._placing.place(need, workers) if workers else None
            if offer is None:
                break
            order.trace.part("route", began, time.monotonic())
            try:
                return await self._offer(order, offer)
            except QueueFull as error:
                full = error
                wait_s = least_wait_s(offer.decision, gone)
                need.refused[offer.target.incarnation] = is_full(error.depth, error.limit)
            except (WorkerGone, BrokerWrongType) as error:
                # Keys of another type are the worker's own: others have better ones.
                junk = error if isinstance(error, BrokerWrongType) else junk
                need.refused[offer.target.incarnation] = "it is gone" if junk is not error else "its stream is none"
                gone.add(offer.target.incarnation)
                workers = able(await self._models.workers(served), order)
        name = served.name
        if full is not None:
            message = f"all queues of model {name!r} are full ({full.limit} jobs each); try again later"
            raise Overloaded(message, min(max(round(wait_s * 1000), LEAST_RETRY_MS), MOST_RETRY_MS))
        if junk is not None:
            raise junk
        raise NoWorker(f"no live worker of model {name!r} takes jobs; {STARTING}")

    def forget(self, sent: Sent) -> None:
        """The job has output, or has ended: its worker's blocks are in the index, if anywhere. May be repeated."""
        if sent.promise is not None:
            self._placing.forget(sent.promise)

    def over(self, sent: Sent) -> None:
        """The call is over, however it ended."""
        self.forget(sent)
        if sent.trial:
            self._placing.breaker.release(sent.incarnation, sent.trial)

    def succeeded(self, model: str, tokens: float, incarnation: str) -> None:
        """An answer of so many tokens has ended by itself or at its limit. `incarnation`: of the worker that gave it;
        empty: not known."""
        self._placing.answers.learn(model, tokens)
        self._placing.breaker.succeeded(incarnation)

    def began(self, sent: Sent) -> None:
        """The job has its first token, where it was sent to: forgets what was expected, and ends a worker's trial."""
        self.forget(sent)
        self._placing.breaker.began(sent.incarnation, sent.trial)

    def failed(self, incarnation: str) -> None:
        """A job has failed, by the fault of that worker."""
        self._placing.breaker.failed(incarnation)

    async def _offer(self, order: Order, offer: Booking) -> Sent:
        applied, stands = True, False
        try:
            # Only now: what came before this took its time.
            deadline_ms = milliseconds(order.remaining_s())
            record = record_of(offer.decision, order.job.request_id, offer.index, time.time_ns() // 1_000_000)
            order.offered, began = True, time.monotonic()
            submitted = await self._jobs.submit(
                order.job,
                digest=order.digest,
                worker=offer.target.worker,
                worker_incarnation=offer.target.incarnation,
                gateway=self._gateway,
                caller=order.caller,
                deadline_ms=deadline_ms,
                max_queue=NO_LIMIT if order.accepted else self._max_queue,
                prefill=offer.charge.load.prefill,
                predicted=offer.predicted,
                route=record.SerializeToString(),
                quota=NO_QUOTA if order.accepted else order.quota,
            )
            stands = submitted is Submitted.ACCEPTED
            order.trace.part("submit", began, time.monotonic())
        except (SubmitError, BrokerFull, BrokerWrongType, DeadlinePassed):
            applied = order.offered = False
            raise
        finally:
            self._placing.settle(offer, applied=applied, stands=stands)
        target = offer.target
        if not stands:
            # It is where another call has sent it. Should it be lost already, its reader will find out.
            there = await self.attach(order.job.request_id, order.digest, order.caller)
            return there or Sent(submitted, target.worker, offer.predicted)
        return Sent(
            *(submitted, target.worker, offer.predicted, target.incarnation, offer.promise, offer.trial),
            fingerprint=target.fingerprint,
        )


def able(workers: Sequence[WorkerInfo], order: Order) -> Sequence[WorkerInfo]:
    """Those of the kind that ran the job before, if there are any that take jobs; else all, unless only those will
    do."""
    if not order.fingerprint:
        return workers
    kin = [each for each in workers if each.fingerprint == order.fingerprint and each.state == READY]
    return kin if kin or order.same_kind else workers


def least_wait_s(decision: Decision, gone: Container[str]) -> float:
    """Until the first of those who take jobs, but have no room, may have some. `gone`: incarnations."""
    ready = [each for each in decision.considered if each.candidate.state == READY]
    return min(each.cost.wait_s for each in ready if each.candidate.incarnation not in gone)


def milliseconds(remaining_s: float | None) -> int | None:
    """Time left, in whole milliseconds. Raises DeadlinePassed when less than one is left."""
    if remaining_s is None:
        return None
    left = int(remaining_s * 1000)
    if left < 1:
        raise DeadlinePassed("the deadline passed before the request was queued")
    return left
