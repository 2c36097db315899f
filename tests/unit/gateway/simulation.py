"""A small fleet in simulated time, to see what routing does: queues, slots, pools that evict, prompts beside answers.

Workers do in whole steps what a worker's scheduler does: running answers get a token each, prompts share what is left
of a step; equal prefixes are computed once; what is full and unused is evicted, least recently used first. Decisions
are made by ``gateway.router.route`` from the charges that scripts would have booked and the blocks that an exact index
would show. Nothing here takes real time.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from statistics import quantiles
from typing import TYPE_CHECKING

from gateway.cost import Candidate, Rates, Work, cached, level
from gateway.pending import Promises
from gateway.repeats import Repeats
from gateway.router import Policy, route
from kvstore.registry import READY, Load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gateway.pending import Promise
    from kvstore.block_hash import BlockHash

BLOCK = 64
"""Tokens; large, so that the test is fast."""
STEP_TOKENS, CHUNK_TOKENS = 512, 256
HEARTBEAT_S = 1.0


@dataclass(eq=False, slots=True)
class SimJob:
    """`blocks` names the prompt's full blocks."""

    arrival_s: float
    prompt: int
    answer: int
    blocks: tuple[BlockHash, ...]
    first_token_s: float = 0.0
    end_s: float = 0.0
    predicted: int = 0
    hits: int = 0
    found: int = 0
    computed: int = 0
    produced: int = 0
    promise: Promise | None = None
    worker: str = ""


@dataclass(slots=True)
class SimWorker:
    """One worker. `speed` multiplies all its rates; `told` is what its measurement of itself is off by."""

    name: str
    pool: int
    """Blocks."""
    rates: Rates
    max_running: int = 32
    speed: float = 1.0
    told: float = 1.0
    load: Load = field(default_factory=Load)
    queue: deque[SimJob] = field(default_factory=deque)
    running: list[SimJob] = field(default_factory=list)
    cached: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    used: Counter[BlockHash] = field(default_factory=Counter)
    offered: set[BlockHash] = field(default_factory=set)
    announced: set[BlockHash] = field(default_factory=set)
    private: int = 0
    """Blocks that answers and unfinished prompts take."""
    stepping: bool = False
    beat_s: float = -1.0
    beat_used: int = 0

    def held(self, blocks: Sequence[BlockHash]) -> int:
        count = 0
        while count < len(blocks) and blocks[count] in self.offered:
            count += 1
        return count

    def charge(self, jobs: int, tokens: int, prefill: int) -> None:
        load = self.load
        self.load = Load(load.jobs + jobs, load.tokens + tokens, load.prefill + prefill, load.sequences + jobs)

    def candidate(self, job: SimJob, held: int, now: float) -> Candidate:
        if now - self.beat_s >= HEARTBEAT_S:
            self.beat_s, self.beat_used = now, (len(self.used) + self.private) * BLOCK
        rates = Rates(
            self.rates.prefill_tok_s * self.speed * self.told,
            self.rates.step_s / self.speed / self.told,
            self.rates.sequence_s / self.speed / self.told,
        )
        return Candidate(
            *(self.name, self.name, READY, "f", self.load, rates),
            held=held * BLOCK,
            max_running=self.max_running,
            kv_tokens=self.pool * BLOCK,
            used=self.beat_used,
        )

    def admit(self) -> None:
        passed: list[SimJob] = []
        while self.queue and len(self.running) < self.max_running:
            job = self.queue.popleft()
            hits = self.held(job.blocks)
            if hits < len(job.blocks) and job.blocks[hits] in self.announced:
                passed.append(job)
                continue
            need = len(job.blocks) - hits + 1 + job.answer // BLOCK
            taken = sum(each in self.cached for each in job.blocks[:hits])
            room = self.pool - len(self.used) - self.private - taken
            if need > room:
                passed.append(job)
                break
            for each in job.blocks[:hits]:
                self.cached.pop(each, None)
                self.used[each] += 1
            while len(self.cached) > self.pool - len(self.used) - self.private - need:
                self.offered.discard(self.cached.popitem(last=False)[0])
            self.private += need
            self.announced.update(job.blocks[hits:])
            job.hits = hits
            job.found = job.computed = min(hits * BLOCK, job.prompt - 1)
            self.running.append(job)
        self.queue.extendleft(reversed(passed))

    def step(self) -> tuple[float, list[SimJob], list[SimJob]]:
        """Seconds, jobs with their first token, and jobs that have ended."""
        self.admit()
        streams = [job for job in self.running if job.produced]
        budget = CHUNK_TOKENS if streams else STEP_TOKENS
        begun: list[SimJob] = []
        prompts = 0
        for job in self.running:
            if not job.produced and budget:
                part = min(budget, job.prompt - job.computed)
                job.computed, budget, prompts = job.computed + part, budget - part, prompts + part
                if job.computed == job.prompt:
                    begun.append(job)
        seconds = prompts / self.rates.prefill_tok_s
        if streams:
            seconds += self.rates.step_s + (len(streams) - 1) * self.rates.sequence_s
        for job in (*streams, *begun):
            job.produced += 1
        return seconds / self.speed, begun, [job for job in (*streams, *begun) if job.produced >= job.answer]

    def finish(self, begun: Sequence[SimJob], ended: Sequence[SimJob]) -> None:
        """The step has been computed."""
        for job in begun:
            self._offer(job)
        for job in ended:
            self._end(job)

    def _offer(self, job: SimJob) -> None:
        own = job.blocks[job.hits :]
        self.private -= len(own)
        self.used.update(own)
        self.offered.update(own)
        self.announced.difference_update(own)

    def _end(self, job: SimJob) -> None:
        self.running.remove(job)
        self.private -= 1 + job.answer // BLOCK
        for each in reversed(job.blocks):  # tails are evicted before heads
            self.used[each] -= 1
            if not self.used[each]:
                del self.used[each]
                self.cached[each] = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a load went like. Seconds, and shares of one. Times to first tokens are of all jobs but the first quarter,
    while caches are empty."""

    jobs: Sequence[SimJob]
    hit_rate: float
    ttft_p50: float
    ttft_p90: float
    throughput: float
    """Answer tokens a second, from the first arrival to the last end."""
    equal: float
    """Predictions that came true."""
    by_worker: dict[str, int]
    """Jobs that each got."""


def simulate(workers: Sequence[SimWorker], jobs: Iterable[SimJob], policy: Policy, *, seed: int = 0) -> Outcome:
    rng, promises, repeats, last = random.Random(seed), Promises(), Repeats(), ""
    arrivals = sorted(jobs, key=lambda job: job.arrival_s)
    mean = sum(job.answer for job in arrivals) // len(arrivals)
    by_name = {each.name: each for each in workers}
    events: list[tuple[float, int, str, list[SimJob], list[SimJob]]] = []
    tick = 0

    def begin_step(worker: SimWorker, now: float) -> None:
        nonlocal tick
        seconds, begun, ended = worker.step()
        worker.stepping = bool(seconds)
        if worker.stepping:
            tick += 1
            heapq.heappush(events, (now + seconds, tick, worker.name, begun, ended))

    def finish_step(now: float, worker: SimWorker, begun: list[SimJob], ended: list[SimJob]) -> None:
        worker.finish(begun, ended)
        for job in begun:
            job.first_token_s = now
            worker.charge(0, 0, job.predicted - job.prompt)
            assert job.promise is not None
            promises.forget(job.promise)
        for job in ended:
            job.end_s = now
            worker.charge(-1, -(job.prompt + job.answer), 0)
        begin_step(worker, now)

    for job in arrivals:
        while events and events[0][0] <= job.arrival_s:
            now, _, name, begun, ended = heapq.heappop(events)
            finish_step(now, by_name[name], begun, ended)
        candidates = [
            each.candidate(job, max(each.held(job.blocks), promises.held(each.name, job.blocks)), job.arrival_s)
            for each in workers
        ]
        most = max(each.held for each in candidates) // BLOCK
        rate = repeats.note(job.blocks[most - 1] if most else None, job.arrival_s)
        work = Work(job.prompt, job.answer, mean, repeats=rate)
        leveled = level([each.fingerprint for each in candidates], [each.rates for each in candidates])
        candidates = [each._replace(rates=rates) for each, rates in zip(candidates, leveled, strict=True)]
        decision = route(candidates, work, policy=policy, refused={}, rng=rng, last=last)
        assert decision.chosen is not None
        last = decision.chosen.candidate.worker
        job.worker, target = last, by_name[last]
        job.predicted = cached(work, decision.chosen.candidate)
        job.promise = promises.make(last, job.blocks)
        target.charge(1, job.prompt + job.answer, job.prompt - job.predicted)
        target.queue.append(job)
        if not target.stepping:
            begin_step(target, job.arrival_s)
    while events:
        now, _, name, begun, ended = heapq.heappop(events)
        finish_step(now, by_name[name], begun, ended)
    assert all(job.end_s for job in arrivals)
    assert all(each.load == Load() for each in workers)
    assert len(promises) == 0
    return _outcome(arrivals, workers)


def _outcome(jobs: Sequence[SimJob], workers: Sequence[SimWorker]) -> Outcome:
    warm = jobs[len(jobs) // 4 :]
    deciles = quantiles([job.first_token_s - job.arrival_s for job in warm], n=10)
    seconds = max(job.end_s for job in jobs) - min(job.arrival_s for job in jobs)
    return Outcome(
        jobs=jobs,
        hit_rate=sum(job.found for job in jobs) / sum(job.prompt for job in jobs),
        ttft_p50=deciles[4],
        ttft_p90=deciles[8],
        throughput=sum(job.answer for job in jobs) / seconds,
        equal=sum(job.predicted == job.found for job in jobs) / len(jobs),
        by_worker={each.name: sum(job.worker == each.name for job in jobs) for each in workers},
    )
