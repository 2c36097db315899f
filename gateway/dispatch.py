"""Routes a job and submits it, trying another worker when one declines."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.errors import STARTING, DeadlinePassed, NoWorker, Overloaded
from gateway.router import READY, Candidate, Charge, Considered, Pending, route
from kvstore.errors import QueueFull, SubmitError, WorkerGone
from kvstore.jobs import Submitted, charge

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from gateway.models import Models, Served
    from kvstore.jobs import Jobs
    from kvstore.registry import Registry, WorkerInfo
    from octavo.v1 import job_pb2

logger = logging.getLogger(__name__)

MAX_TRIES: Final = 8
"""Workers that one job is offered to."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to submit. `remaining_s` tells, when asked, how many seconds the client still waits; None: for ever."""

    job: job_pb2.Job
    digest: bytes
    remaining_s: Callable[[], float | None]

    @property
    def cost(self) -> int:
        """Tokens that the job is charged at."""
        return charge(self.job)


@dataclass(frozen=True, slots=True)
class Sent:
    """A job that the broker has. `worker` is where it was sent; empty, or not where it is, for one that was attached
    to."""

    submitted: Submitted
    worker: str


class Dispatch:
    """Hands jobs to workers on behalf of one gateway."""

    def __init__(
        self, jobs: Jobs, registry: Registry, models: Models, *, gateway: str, max_queue: int, rng: random.Random
    ) -> None:
        self._jobs = jobs
        self._registry = registry
        self._models = models
        self._gateway = gateway
        self._max_queue = max_queue
        self._rng = rng
        self._pending = Pending()

    async def attach(self, request_id: str, digest: bytes) -> Sent | None:
        """To the job of that id, if there is one: it needs no worker that takes jobs, not even a live one.

        Raises RequestIdTaken, BrokerError.
        """
        attached = await self._jobs.attach(request_id, digest=digest, gateway=self._gateway)
        return Sent(Submitted.ATTACHED, "") if attached else None

    async def submit(self, order: Order, served: Served) -> Sent:
        """Submits to the best worker that takes the job.

        Raises Overloaded, NoWorker, DeadlinePassed, RequestIdTaken, BrokerFull: nothing was queued. Any other
        BrokerError: unknown.
        """
        workers: Sequence[WorkerInfo] = served.workers
        refused: dict[str, str] = {}
        full: QueueFull | None = None
        for _ in range(MAX_TRIES):
            deadline_ms = milliseconds(order.remaining_s())
            decided = await self._decide(order, workers, refused)
            if decided is None:
                break
            target, charge = decided
            try:
                return Sent(await self._offer(order, target, charge, deadline_ms), target.worker)
            except QueueFull as error:
                full = error
                refused[target.incarnation] = f"its queue is full ({error.depth} of {error.limit})"
            except WorkerGone:
                refused[target.incarnation] = "it is gone"
                workers = await self._models.workers(served)
        name = served.name
        if full is not None:
            raise Overloaded(f"all queues of model {name!r} are full ({full.limit} jobs each); try again later")
        raise NoWorker(f"no live worker of model {name!r} takes jobs; {STARTING}")

    async def _decide(
        self, order: Order, workers: Sequence[WorkerInfo], refused: dict[str, str]
    ) -> tuple[Considered, Charge] | None:
        """Reads the loads, routes, and charges the choice before any other decision can be made without it."""
        reading = self._pending.begin_reading()
        try:
            able = sum(each.state == READY and each.incarnation not in refused for each in workers)
            # The only one that can be chosen is chosen whatever its load.
            loads = await self._registry.loads(workers) if able > 1 else {}
            candidates = [
                Candidate(each.id, each.incarnation, each.state, loads[each.id].tokens if each.id in loads else 0)
                for each in workers
            ]
            decision = route(candidates, pending=self._pending.unseen_by(reading), refused=refused, rng=self._rng)
            logger.debug("job %s: %s", order.job.request_id, decision)
            if decision.chosen is None:
                return None
            return decision.chosen, self._pending.charge(decision.chosen.incarnation, order.cost)
        finally:
            self._pending.end_reading(reading)

    async def _offer(self, order: Order, target: Considered, charge: Charge, deadline_ms: int | None) -> Submitted:
        applied = True
        try:
            return await self._jobs.submit(
                order.job,
                digest=order.digest,
                worker=target.worker,
                worker_incarnation=target.incarnation,
                gateway=self._gateway,
                deadline_ms=deadline_ms,
                max_queue=self._max_queue,
            )
        except SubmitError:
            applied = False
            raise
        finally:
            self._pending.settle(charge, applied=applied)


def milliseconds(remaining_s: float | None) -> int | None:
    """Time left, in whole milliseconds. Raises DeadlinePassed when less than one is left."""
    if remaining_s is None:
        return None
    left = int(remaining_s * 1000)
    if left < 1:
        raise DeadlinePassed("the deadline passed before the request was queued")
    return left
