"""A fleet with orphans, for tests of where they go."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from gateway.breaker import Breaker
from gateway.placing import Placing
from gateway.rehoming import Rehoming
from kvstore.errors import BrokerWrongType
from kvstore.jobs import JobState
from kvstore.orphans import Orphan, Rehomed, Target
from kvstore.prefix_index import Seen
from kvstore.registry import Load, WorkerInfo
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class World:
    """A fleet, its index, and a broker that takes what is moved, unless it is told otherwise."""

    def __init__(self, *workers: WorkerInfo) -> None:
        self.live = list(workers)
        self.orphaned: list[Orphan] = []
        self.loads: dict[str, Load] = {}
        self.held: dict[str, int] = {}
        self.answer = Rehomed.MOVED
        self.broken: dict[str, Exception] = {}
        """Jobs that can't be moved."""
        self.streamless: set[str] = set()
        """Workers whose stream is a key of another type."""
        self.suspects: set[str] = set()
        """Workers that have one which must be alone."""
        self.done: Counter[Rehomed] = Counter()
        self.moves: list[tuple[str, Target | None]] = []
        self.looks = 0
        self.read: list[str] = []
        """Jobs whose prompts were looked at."""
        self.gone: set[str] = set()
        """Jobs that have ended meanwhile."""
        self.scored = False
        """Jobs want log-probabilities of their prompts."""
        self.promised: list[int] = []
        world: Any = self
        self.placing = Placing(world, world, max_queue=64, rng=random.Random(0), breaker=Breaker(lambda: 100.0))
        self.rehoming = Rehoming(world, world, self.placing)

    async def orphans(self) -> list[Orphan]:
        return self.orphaned

    async def workers(self) -> list[WorkerInfo]:
        self.looks += 1
        return self.live

    async def match(self, workers: Sequence[WorkerInfo], _: Mapping[str, object]) -> dict[str, Seen]:
        return {each.id: Seen(self.held.get(each.id, 0), self.loads.get(each.id, Load())) for each in workers}

    async def orphaned_job(self, orphan: Orphan) -> job_pb2.Job | None:
        self.read.append(orphan.request_id)
        if orphan.request_id in self.gone:
            return None
        job = job_pb2.Job(
            request_id=orphan.request_id,
            model="m",
            prompt_token_ids=range(orphan.prompt_tokens),
            stopping=inference_pb2.Stopping(max_tokens=50, ignore_eos=True),
            n=len(orphan.next),
        )
        if self.scored:
            job.prompt_logprobs = 0
        return job

    async def rehome(self, orphan: Orphan, target: Target | None) -> Rehomed:
        self.moves.append((orphan.request_id, target))
        self.promised.append(len(self.placing._promises))
        if orphan.request_id in self.broken:
            raise self.broken[orphan.request_id]
        if target is None:
            return Rehomed.DEAD if orphan.doomed else Rehomed.WAITING
        if target.worker in self.streamless:
            raise BrokerWrongType("WRONGTYPE", [f"jobs:{target.worker}"])
        if orphan.deaths and target.worker in self.suspects:
            return Rehomed.WAITING
        if orphan.deaths > 1 and self.answer is Rehomed.MOVED:
            self.suspects.add(target.worker)
        return self.answer

    async def run(self, *orphans: Orphan) -> dict[Rehomed, int]:
        """One round; nothing of it may stay booked."""
        self.orphaned, self.done = list(orphans), Counter()
        try:
            await self.rehoming.run(self.done)
            return dict(self.done)
        finally:
            assert len(self.placing.pending) == len(self.placing._promises) == 0

    def targets(self) -> dict[str, str]:
        """Workers by request id."""
        return {request_id: target.worker for request_id, target in self.moves if target is not None}


def worker(name: str, **fields: Any) -> WorkerInfo:
    told = {"model": "m", "fingerprint": "f", "prefill_tok_s": 1000.0, "tokenizer": "t", "block_size": 16, **fields}
    return WorkerInfo(id=name, incarnation=f"{name}-1", **told)


def orphan(request_id: str = "r", prompt: int = 40, said: Sequence[int] = (0,), **fields: Any) -> Orphan:
    """Of worker `dead`. What is not told: never claimed."""
    return Orphan(
        worker="dead",
        incarnation="dead-1",
        entry_id="1-1",
        request_id=request_id,
        model="m",
        prompt_tokens=prompt,
        longest=prompt + 50,
        next=tuple(said),
        state=JobState.RUNNING,
        seen_ms=0,
        waited_ms=0,
        **{
            "why": "died",
            "fingerprint": "f",
            "deaths": 0,
            "fruitless": 0,
            "ended": frozenset(),
            "attempt": 1,
            **fields,
        },
    )
