"""Routes a job and submits it, trying another worker when one declines."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from operator import is_not
from typing import TYPE_CHECKING, Final

from gateway.answers import MAX_MODELS, Answers
from gateway.cost import Candidate, Rates, Work, cached, level
from gateway.errors import STARTING, DeadlinePassed, NoWorker, Overloaded
from gateway.pending import Pending, Promises, added
from gateway.prefixes import Index, Looks, PromptHashes, View
from gateway.record import record_of
from gateway.router import READY, Decision, Policy, route
from kvstore.errors import BrokerFull, QueueFull, SubmitError, WorkerGone
from kvstore.jobs import Submitted, charge
from kvstore.registry import Load

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Container, Mapping, Sequence

    from gateway.models import Models, Served
    from gateway.pages import Stored
    from gateway.pending import Charge, Promise
    from kvstore.jobs import Jobs
    from kvstore.prefix_index import PrefixIndex
    from kvstore.registry import Registry, WorkerInfo
    from octavo.v1 import job_pb2

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
    offered: bool = False
    """It is on its way to a worker, or there: false again once that is known to have failed."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A job that the broker has. `worker` is where it was sent; for one that was attached to, where it was then."""

    submitted: Submitted
    worker: str
    predicted: int = 0
    """Prompt tokens that were expected in the worker's cache."""
    promise: Promise | None = None
    """To be given back with ``Dispatch.forget`` once the job has output, or has ended."""


@dataclass(frozen=True, slots=True)
class Booking:
    """A decision that is about to be submitted, and what it has booked."""

    decision: Decision
    target: Candidate
    predicted: int
    index: Index
    charge: Charge
    promise: Promise


class Dispatch:
    """Hands jobs to workers on behalf of one gateway."""

    def __init__(
        self,
        jobs: Jobs,
        registry: Registry,
        index: PrefixIndex,
        models: Models,
        *,
        gateway: str,
        max_queue: int,
        rng: random.Random,
        policy: Policy = Policy.PREFIX,
        pages: Stored | None = None,
    ) -> None:
        self._jobs = jobs
        self._looks = Looks(index, registry, pages)
        self._models = models
        self._gateway = gateway
        self._max_queue = max_queue
        self._rng = rng
        self._policy = policy
        self._pending = Pending()
        self._promises = Promises()
        self._speeds = Speeds()
        self._last: OrderedDict[str, str] = OrderedDict()
        self.answers = Answers()
        """What is learnt of how long answers are."""
        self.index = Index.EXACT
        """What the last decision could know of prefixes."""

    async def attach(self, request_id: str, digest: bytes, caller: str) -> Sent | None:
        """To the job of that id, if there is one: it needs no worker that takes jobs, not even a live one.

        Raises RequestIdTaken, BrokerError.
        """
        found = await self._jobs.attach(request_id, digest=digest, gateway=self._gateway, caller=caller)
        return Sent(Submitted.ATTACHED, found.worker, found.predicted) if found is not None else None

    async def submit(self, order: Order, served: Served) -> Sent:
        """Submits to the best worker that takes the job.

        Raises Overloaded, NoWorker, DeadlinePassed, RequestIdTaken, BrokerFull: nothing was queued. Any other
        BrokerError: unknown if ``order.offered``, else nothing was queued either.
        """
        workers: Sequence[WorkerInfo] = served.workers
        hashes = PromptHashes(order.job)
        refused: dict[str, str] = {}
        gone: set[str] = set()
        full: QueueFull | None = None
        wait_s = 0.0
        for _ in range(MAX_TRIES):
            offer = await self._decide(order.job, workers, hashes, refused)
            if offer is None:
                break
            try:
                return await self._offer(order, offer)
            except QueueFull as error:
                full = error
                wait_s = least_wait_s(offer.decision, gone)
                refused[offer.target.incarnation] = _full(error.depth, error.limit)
            except WorkerGone:
                refused[offer.target.incarnation] = "it is gone"
                gone.add(offer.target.incarnation)
                workers = await self._models.workers(served)
        name = served.name
        if full is not None:
            message = f"all queues of model {name!r} are full ({full.limit} jobs each); try again later"
            raise Overloaded(message, min(max(round(wait_s * 1000), LEAST_RETRY_MS), MOST_RETRY_MS))
        raise NoWorker(f"no live worker of model {name!r} takes jobs; {STARTING}")

    def forget(self, sent: Sent) -> None:
        """The job has output, or has ended: its worker's blocks are in the index, if anywhere. May be repeated."""
        if sent.promise is not None:
            self._promises.forget(sent.promise)

    async def _decide(
        self, job: job_pb2.Job, workers: Sequence[WorkerInfo], hashes: PromptHashes, refused: Mapping[str, str]
    ) -> Booking | None:
        """Looks, routes, and books the choice before any other decision can be made without it."""
        reading = 0

        def begin() -> None:
            nonlocal reading
            reading = self._pending.begin_reading()

        try:
            view = await self._looks.look(workers, hashes, lambda: self._promised(workers, hashes), begin)
            self.index = view.index
            candidates = self._candidates(job, workers, view, reading)
            work = Work(
                prompt=len(job.prompt_token_ids),
                answer=self.answers.expected(job),
                others=self.answers.mean(job.model),
                choices=max(job.n, 1),
            )
            unable = {**self._seem_full(candidates, refused), **refused}
            last = self._last.get(job.model, "")
            decision = route(candidates, work, policy=self._policy, refused=unable, rng=self._rng, last=last)
            if decision.chosen is None:
                return None
            target = decision.chosen.candidate
            self._note(job.model, target.worker)
            predicted = cached(work, target)
            load = Load(1, charge(job), work.prompt - predicted, work.choices)
            chosen = next(each for each in workers if each.incarnation == target.incarnation)
            return Booking(
                *(decision, target, predicted, view.index),
                self._pending.charge(target.incarnation, load),
                self._promises.make(target.incarnation, hashes.of(chosen)),
            )
        finally:
            self._pending.end_reading(reading)

    def _promised(self, workers: Sequence[WorkerInfo], hashes: PromptHashes) -> dict[str, int]:
        """Blocks by worker id."""
        return {each.id: self._promises.held(each.incarnation, hashes.of(each)) for each in workers}

    def _candidates(self, job: job_pb2.Job, workers: Sequence[WorkerInfo], view: View, reading: int) -> list[Candidate]:
        unseen = self._pending.unseen_by(reading)
        # A prompt whose own log-probabilities are wanted is computed as a whole.
        scored = job.HasField("prompt_logprobs")
        found: list[Candidate] = []
        for each, rates in zip(workers, self._speeds.of(workers), strict=True):
            load, size = view.loads[each.id], each.block_size
            if each.incarnation in unseen:
                load = added(load, unseen[each.incarnation])
            found.append(
                Candidate(
                    *(each.id, each.incarnation, each.state, each.fingerprint, load, rates),
                    held=0 if scored else view.held_blocks[each.id] * size,
                    stored=0 if scored else view.stored_blocks.get(each.id, 0) * size,
                    max_running=each.max_running,
                    kv_tokens=each.kv_tokens,
                    used=each.blocks_used * size,
                )
            )
        return found

    def _seem_full(self, candidates: Sequence[Candidate], refused: Mapping[str, str]) -> dict[str, str]:
        """Those whose queues are full by their charges, unless that is everybody: then their queues are asked."""
        able = [each for each in candidates if each.state == READY and each.incarnation not in refused]
        full = [each for each in able if each.load.jobs >= self._max_queue]
        if len(full) == len(able):
            return {}
        return {each.incarnation: _full(each.load.jobs, self._max_queue) for each in full}

    def _note(self, model: str, worker: str) -> None:
        self._last.pop(model, None)
        self._last[model] = worker
        while len(self._last) > MAX_MODELS:
            self._last.popitem(last=False)

    async def _offer(self, order: Order, offer: Booking) -> Sent:
        applied, stands = True, False
        try:
            # Only now: what came before this took its time.
            deadline_ms = milliseconds(order.remaining_s())
            record = record_of(offer.decision, order.job.request_id, offer.index, time.time_ns() // 1_000_000)
            order.offered = True
            submitted = await self._jobs.submit(
                order.job,
                digest=order.digest,
                worker=offer.target.worker,
                worker_incarnation=offer.target.incarnation,
                gateway=self._gateway,
                caller=order.caller,
                deadline_ms=deadline_ms,
                max_queue=self._max_queue,
                prefill=offer.charge.load.prefill,
                predicted=offer.predicted,
                route=record.SerializeToString(),
            )
            stands = submitted is Submitted.ACCEPTED
        except (SubmitError, BrokerFull, DeadlinePassed):
            applied = order.offered = False
            raise
        finally:
            self._pending.settle(offer.charge, applied=applied)
            if not stands:
                self._promises.forget(offer.promise)
        return Sent(submitted, offer.target.worker, offer.predicted, offer.promise)


class Speeds:
    """Rates to reckon with, computed once for each look at the fleet: the same leases serve many decisions."""

    def __init__(self) -> None:
        self._workers: Sequence[WorkerInfo] = ()
        self._rates: list[Rates] = []

    def of(self, workers: Sequence[WorkerInfo]) -> list[Rates]:
        """One for each."""
        if len(workers) != len(self._workers) or any(map(is_not, workers, self._workers)):
            self._workers = workers
            told = [
                Rates(each.prefill_tok_s, each.step_ms / 1000, each.sequence_ms / 1000, each.fetch_tok_s)
                for each in workers
            ]
            self._rates = level([each.fingerprint for each in workers], told)
        return self._rates


def least_wait_s(decision: Decision, gone: Container[str]) -> float:
    """Until the first of those who take jobs, but have no room, may have some. `gone`: incarnations."""
    ready = [each for each in decision.considered if each.candidate.state == READY]
    return min(each.cost.wait_s for each in ready if each.candidate.incarnation not in gone)


def _full(jobs: int, limit: int) -> str:
    return f"its queue is full ({jobs} of {limit})"


def milliseconds(remaining_s: float | None) -> int | None:
    """Time left, in whole milliseconds. Raises DeadlinePassed when less than one is left."""
    if remaining_s is None:
        return None
    left = int(remaining_s * 1000)
    if left < 1:
        raise DeadlinePassed("the deadline passed before the request was queued")
    return left
