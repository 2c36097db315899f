"""Charges do not drift: whatever happens to jobs and workers, each load is the sum of the jobs that live there."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Commit, Finished, Rehomed, Target
from octavo.v1 import inference_pb2

from ..conftest import names
from .conftest import Stage, chunk

if TYPE_CHECKING:
    from kvstore.jobs import Entry, Orphan
    from kvstore.registry import WorkerInfo
    from octavo.v1 import job_pb2

STEPS = 250
ANSWER = 7
"""Tokens of each answer at most, as ``Stage.submit`` has it."""
STOP = inference_pb2.STOP


@dataclass
class Kept:
    """A live job, as this test remembers it."""

    prompt: int
    n: int
    prefill: int
    """What its prompt is charged with now."""
    life: WorkerInfo
    """Where it is charged."""
    reader: WorkerInfo | None = None
    """Who has read its entry."""
    owner: WorkerInfo | None = None
    """Who has claimed it."""
    attempt: int = 0
    next: dict[int, int] = field(default_factory=dict)
    """By choice that has not ended."""

    @property
    def charge(self) -> int:
        return self.prompt + self.n * ANSWER


class Books:
    """Does random things to jobs and workers, and keeps an account of its own."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.dice = random.Random(seed)
        self.live: dict[str, WorkerInfo] = {}
        self.lives: list[WorkerInfo] = []
        self.jobs: dict[str, Kept] = {}
        self.unclaimed: list[tuple[WorkerInfo, Entry]] = []
        self.past: list[tuple[WorkerInfo, job_pb2.Delivery]] = []
        self.counts: dict[str, int] = defaultdict(int)

    async def start(self, name: str) -> None:
        """A worker begins a life; an earlier one of the same name may have left jobs."""
        worker = await self.stage.worker(name, prefill_tok_s=100.0, max_running=1)
        self.live[name] = worker
        self.lives.append(worker)
        # The first read of a stream makes its group.
        await self.read_by(worker, 1)

    def any_worker(self) -> WorkerInfo:
        return self.dice.choice([*self.live.values()])

    def some(self, wanted: list[str]) -> list[str]:
        return self.dice.sample(wanted, min(len(wanted), self.dice.randrange(1, 4)))

    async def submit(self) -> None:
        worker, request_id = self.any_worker(), f"r{self.counts['submit']}"
        prompt, n = self.dice.randrange(1, 60), self.dice.choice([1, 1, 1, 2, 3])
        prefill = self.dice.randrange(prompt + 1)
        for _ in range(self.dice.choice([1, 1, 2])):  # again: attaches, charges nothing
            await self.stage.submit(
                request_id, worker, n=n, prompt=range(prompt), prefill=prefill, predicted=prompt - prefill
            )
        self.jobs[request_id] = Kept(prompt, n, prefill, worker, next=dict.fromkeys(range(n), 0))

    async def read(self) -> None:
        await self.read_by(self.any_worker(), self.dice.randrange(1, 5))

    async def read_by(self, worker: WorkerInfo, count: int) -> None:
        for entry in await self.stage.jobs.next_entries(self.stage.reader, worker.id, worker.incarnation, count, 1):
            self.unclaimed.append((worker, entry))
            if entry.request_id in self.jobs:
                self.jobs[entry.request_id].reader = worker

    async def claim(self) -> None:
        for worker in self.live.values():
            mine = [entry for reader, entry in self.unclaimed if reader is worker]
            for claim in await self.stage.jobs.claim(worker.id, worker.incarnation, mine):
                job = self.jobs[claim.job.request_id]
                job.life = job.owner = worker
                assert {choice: claim.next[choice] for choice in job.next} == job.next
                assert claim.ended.isdisjoint(job.next)
                job.attempt = claim.attempt
        self.unclaimed.clear()

    async def commit(self) -> None:
        worker = self.any_worker()
        step = []
        for request_id in self.some([each for each, job in self.jobs.items() if job.owner is worker]):
            job = self.jobs[request_id]
            choice = self.dice.choice([*job.next])
            finish = STOP if self.dice.random() < 0.4 else inference_pb2.FINISH_REASON_UNSPECIFIED
            tokens = [] if finish and self.dice.random() < 0.3 else [1]
            start, attempt = job.next[choice], job.attempt
            step.append(chunk(request_id, start, tokens, choice=choice, attempt=attempt, finish=finish))
        outcomes = await self.stage.commit(worker, *step)
        assert outcomes == [Commit.WRITTEN] * len(step)
        for delivery in step:
            self.past.append((worker, delivery))
            job, body = self.jobs[delivery.request_id], delivery.chunk
            job.prefill = 0
            job.next[body.choice] += len(body.token_ids)
            if body.finish:
                del job.next[body.choice]
            if not job.next:
                del self.jobs[delivery.request_id]

    async def repeat(self) -> None:
        """Commits after a lost reply, some of them by workers that died meanwhile."""
        for worker, delivery in self.dice.sample(self.past, min(len(self.past), 3)):
            (outcome,) = await self.stage.commit(worker, delivery)
            assert outcome in (Commit.DUPLICATE, Commit.FENCED)

    async def cancel(self) -> None:
        for request_id in self.some([*self.jobs])[:1]:
            assert await self.stage.jobs.cancel(request_id) is Finished.ENDED
            assert await self.stage.jobs.cancel(request_id) is Finished.ALREADY
            del self.jobs[request_id]

    async def steal(self) -> None:
        thief, victim = self.any_worker(), self.any_worker()
        taken = await self.stage.jobs.steal(thief.id, thief.incarnation, victim.id, prefill_s_per_token=0.0101)
        if not taken:
            return
        self.counts["stolen"] += 1
        moved = [
            request_id
            for request_id, job in self.jobs.items()
            if job.life.id == victim.id and (await self.stage.record(request_id)).worker == thief.id
        ]
        assert len(moved) == 1
        job = self.jobs[moved[0]]
        assert job.reader is None
        # Of one that was moved, all that it is charged with: the test predicts nothing of those.
        job.life, job.prefill = thief, max(job.prompt, job.prefill)

    async def die(self) -> None:
        """With or without a successor before a gateway notices, who moves its jobs."""
        worker = self.any_worker()
        await self.stage.registry.leave(worker.id, worker.incarnation)
        self.unclaimed = [(reader, entry) for reader, entry in self.unclaimed if reader is not worker]
        if risen := self.dice.random() < 0.5:
            await self.start(worker.id)
        found = await self.stage.jobs.orphans()
        orphaned = {
            request_id
            for request_id, job in self.jobs.items()
            if job.life.id == worker.id and (not risen or job.reader is worker)
        }
        assert {orphan.request_id for orphan in found} == orphaned
        able = [each for each in self.live.values() if risen or each is not worker]
        for orphan in found:
            await self.rehome(orphan, self.dice.choice(able))
        if not risen:
            await self.start(worker.id)

    async def rehome(self, orphan: Orphan, worker: WorkerInfo) -> None:
        request_id, prefill = orphan.request_id, self.dice.randrange(60)
        target = Target(worker.id, worker.incarnation, prefill, 0)
        became = await self.stage.jobs.rehome(orphan, target)
        if became is Rehomed.WAITING:  # until another suspect is proven, of which others tell
            assert orphan.deaths
            await self.stage.broker.call("DEL", self.stage.broker.keys.suspect(worker.id))
            became = await self.stage.jobs.rehome(orphan, target)
        self.counts[became.value] += 1
        if orphan.doomed:
            assert became is Rehomed.DEAD
            del self.jobs[request_id]
            return
        assert became is Rehomed.MOVED
        assert await self.stage.jobs.rehome(orphan, target) is Rehomed.STALE
        job = self.jobs[request_id]
        assert {choice: orphan.next[choice] for choice in job.next} == job.next
        job.life, job.prefill, job.reader, job.owner = worker, prefill, None, None

    async def freeze(self) -> None:
        """Past the lease: a gateway has moved one of the worker's jobs when the same life goes on."""
        worker, broker = self.any_worker(), self.stage.broker
        await broker.pipeline([("DEL", broker.keys.worker(worker.id)), ("ZADD", broker.keys.workers, 0, worker.id)])
        found = await self.stage.jobs.orphans()
        mine = {request_id for request_id, job in self.jobs.items() if job.life.id == worker.id}
        assert {orphan.request_id for orphan in found} == mine
        other = self.dice.choice([each for each in self.live.values() if each is not worker])
        for orphan in found[:1]:
            await self.rehome(orphan, other)
        await self.stage.registry.renew(worker)
        target = Target(other.id, other.incarnation, 0, 0)
        for orphan in found[1:]:
            assert await self.stage.jobs.rehome(orphan, target) is Rehomed.STALE
        self.counts["thawed"] += len(mine) > 1

    async def check(self) -> None:
        """Each load of each life that ever was, and the ledger."""
        assert (await self.stage.jobs.ledger()).holds
        expected: dict[str, dict[bytes, int]] = {}
        for job in self.jobs.values():
            name = self.stage.broker.keys.load(job.life.id, job.life.incarnation)
            load = expected.setdefault(name, {b"jobs": 0, b"sequences": 0, b"tokens": 0, b"prefill": 0})
            load[b"jobs"] += 1
            load[b"sequences"] += job.n
            load[b"tokens"] += job.charge
            load[b"prefill"] += job.prefill
        keys = [self.stage.broker.keys.load(life.id, life.incarnation) for life in self.lives]
        for name, stored in zip(
            keys, await self.stage.broker.pipeline([("HGETALL", key) for key in keys]), strict=True
        ):
            found = {field: int(value) for field, value in stored.items()}
            if found:
                found.setdefault(b"prefill", 0)
            assert found == expected.get(name, {}), name


@pytest.mark.parametrize("seed", range(3))
async def test_loads_are_the_sum_of_live_jobs_at_every_moment(stage: Stage, seed: int) -> None:
    books = Books(stage, seed)
    for number in range(3):
        await books.start(f"w{number}")
    ways = {
        books.submit: 10,
        books.read: 4,
        books.claim: 4,
        books.commit: 10,
        books.repeat: 2,
        books.cancel: 1,
        books.steal: 4,
        books.die: 0.5,
        books.freeze: 1,
    }
    for _ in range(STEPS):
        (do,) = books.dice.choices([*ways], [*ways.values()])
        books.counts[do.__name__] += 1
        await do()
        await books.check()
    # Otherwise this was a test of less than it says.
    assert all(books.counts[kind] for kind in ("stolen", "moved", "repeat", "cancel", "thawed"))
    for request_id in books.jobs:
        assert await stage.jobs.cancel(request_id) is Finished.ENDED
    assert [name for name in await names(stage.broker) if ":load:" in name] == []
