"""Decides where a job goes, and books the choice before any other decision can be made without it."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import is_not
from typing import TYPE_CHECKING

from gateway.answers import MAX_MODELS, Answers
from gateway.breaker import Breaker
from gateway.cost import Candidate, Rates, Work, cached, level, takers
from gateway.pending import Pending, Promises, added
from gateway.prefixes import Index, Looks, PromptHashes, View, kind_of
from gateway.repeats import ModelRepeats
from gateway.router import Decision, Policy, route
from kvstore.jobs import charge
from kvstore.registry import Load

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from gateway.pages import Stored
    from gateway.pending import Charge, Promise
    from kvstore.prefix_index import PrefixIndex
    from kvstore.registry import Registry, WorkerInfo
    from octavo.v1 import job_pb2


@dataclass(slots=True)
class Need:
    """A job that wants a worker, and what one needs to know to find it."""

    job: job_pb2.Job
    hashes: PromptHashes
    said: Sequence[int] = ()
    """Tokens that each of its open choices has already, from an earlier worker."""
    told: bool = False
    """Log-probabilities of its prompt, if they are wanted, have been told."""
    refused: dict[str, str] = field(default_factory=dict)
    """Workers that can't take it: incarnation to reason."""
    trials: bool = True
    """Whether it may go to a worker that is on trial."""
    repeats: float | None = None
    """Jobs a second that begin like this one, if most do; None until that was looked up, which counts it, too."""

    @property
    def scored(self) -> bool:
        """Whether its prompt must be computed as a whole, because log-probabilities of it are wanted."""
        return self.job.HasField("prompt_logprobs") and not self.told


@dataclass(frozen=True, slots=True)
class Booking:
    """A decision that is about to be carried out, and what it has booked."""

    decision: Decision
    target: Candidate
    predicted: int
    index: Index
    charge: Charge
    promise: Promise
    trial: int


class Placing:
    """The decisions of one gateway."""

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        *,
        max_queue: int,
        rng: random.Random,
        policy: Policy = Policy.PREFIX,
        pages: Stored | None = None,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._looks = Looks(index, registry, pages)
        self._max_queue = max_queue
        self._rng = rng
        self._policy = policy
        self._promises = Promises()
        self._speeds = Speeds()
        self._repeats = ModelRepeats()
        self._clock = clock
        self._last: OrderedDict[str, str] = OrderedDict()
        self.pending = Pending()
        """What is decided, and may not show in Redis yet."""
        self.answers = Answers()
        """What is learnt of how long answers are."""
        self.breaker = breaker or Breaker()
        """What is learnt of workers that fail."""
        self.index = Index.EXACT
        """What the last decision could know of prefixes."""

    async def place(self, need: Need, workers: Sequence[WorkerInfo]) -> Booking | None:
        """Looks, routes, and books the choice. None: none of the workers takes jobs. Raises BrokerError."""
        reading = 0

        def begin() -> None:
            nonlocal reading
            reading = self.pending.begin_reading()

        try:
            view = await self._looks.look(workers, need.hashes, lambda: self._promised(workers, need.hashes), begin)
            self.index = view.index
            candidates = self._candidates(need, workers, view, reading)
            unable = self._unable(candidates, need)
            work = self._work(need, self._repeated(need, workers, candidates, unable))
            last = self._last.get(need.job.model, "")
            decision = route(candidates, work, policy=self._policy, refused=unable, rng=self._rng, last=last)
            return self._booked(need, workers, decision, view.index)
        finally:
            self.pending.end_reading(reading)

    def settle(self, booking: Booking, *, applied: bool, stands: bool) -> None:
        """The booking was carried out: `applied` unless Redis will never show it, and `stands` if a worker is now to
        compute the prompt for it."""
        self.pending.settle(booking.charge, applied=applied)
        if not stands:
            self._promises.forget(booking.promise)
            if booking.trial:
                self.breaker.release(booking.target.incarnation, booking.trial)

    def forget(self, promise: Promise) -> None:
        """The job has output, or has ended: its worker's blocks are in the index, if anywhere. May be repeated."""
        self._promises.forget(promise)

    def _repeated(
        self,
        need: Need,
        workers: Sequence[WorkerInfo],
        candidates: Sequence[Candidate],
        unable: Mapping[str, str],
    ) -> float:
        """How many jobs a second begin like this one, as far as that worker has it that has the most of those that
        could take it; 0: few."""
        held = [candidates[at].held for at in takers(candidates, unable)]
        if need.repeats is None and held:
            # One kind of worker names prompts for all: the same one must not count twice, whoever holds most of it.
            names = min(workers, key=kind_of)
            blocks = max(held) // names.block_size
            beginning = need.hashes.of(names)[blocks - 1] if blocks else None
            need.repeats = self._repeats.of(need.job.model).note(beginning, self._clock())
        return need.repeats or 0.0

    def _work(self, need: Need, repeats: float) -> Work:
        # What was said is computed anew, each choice's for itself, as is what a prompt lacks in the cache.
        choices, said, longest = max(need.job.n, 1), sum(need.said), max(need.said, default=0)
        return Work(
            prompt=len(need.job.prompt_token_ids) + said,
            answer=max(1, self.answers.expected(need.job) - longest),
            others=self.answers.mean(need.job.model),
            choices=choices,
            repeats=repeats,
        )

    def _booked(self, need: Need, workers: Sequence[WorkerInfo], decision: Decision, index: Index) -> Booking | None:
        if decision.chosen is None:
            return None
        target, work = decision.chosen.candidate, decision.work
        self._note(need.job.model, target.worker)
        predicted = cached(work, target)
        load = Load(1, charge(need.job), work.prompt - predicted, work.choices)
        chosen = next(each for each in workers if each.incarnation == target.incarnation)
        return Booking(
            *(decision, target, predicted, index),
            self.pending.charge(target.incarnation, load),
            self._promises.make(target.incarnation, need.hashes.of(chosen)),
            self.breaker.begin(target.incarnation) if need.trials else 0,
        )

    def _promised(self, workers: Sequence[WorkerInfo], hashes: PromptHashes) -> dict[str, int]:
        """Blocks by worker id, of those that any are promised to."""
        known = self._promises.incarnations
        return {
            each.id: self._promises.held(each.incarnation, hashes.of(each))
            for each in workers
            if each.incarnation in known
        }

    def _candidates(self, need: Need, workers: Sequence[WorkerInfo], view: View, reading: int) -> list[Candidate]:
        unseen = self.pending.unseen_by(reading)
        scored = need.scored
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

    def _unable(self, candidates: Sequence[Candidate], need: Need) -> Mapping[str, str]:
        """Who can't, or should not, take the job, and why."""
        able = [candidates[at] for at in takers(candidates, need.refused)]
        full = self._seem_full(able)
        others = [each.incarnation for each in able if each.incarnation not in full]
        return {**full, **self.breaker.refused(others, trials=need.trials), **need.refused}

    def _seem_full(self, able: Sequence[Candidate]) -> dict[str, str]:
        """Those whose queues are full by their charges, unless that is everybody: then their queues are asked."""
        full = [each for each in able if each.load.jobs >= self._max_queue]
        if len(full) == len(able):
            return {}
        return {each.incarnation: is_full(each.load.jobs, self._max_queue) for each in full}

    def _note(self, model: str, worker: str) -> None:
        self._last.pop(model, None)
        self._last[model] = worker
        while len(self._last) > MAX_MODELS:
            self._last.popitem(last=False)


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


def is_full(jobs: int, limit: int) -> str:
    """Why a worker with a queue of its own takes no more."""
    return f"its queue is full ({jobs} of {limit})"
