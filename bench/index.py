"""`octavo bench index`: what routing by prefix and committing cost, in the broker and at its client.

A broker of its own, with workers that exist in it alone: leases, blocks they hold, loads. No model, no gateway. What
the server tells of itself (INFO) is read before, during and after each part: the time in scripts, and the processor
time of the whole process, which covers parsing and publishing as well.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from bench.index_broker import delivery, listening, read
from bench.index_decision import Decisions, job_of
from bench.index_figures import Part, part
from bench.machine import describe_machine
from kvstore.block_hash import chain, root
from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from kvstore.jobs import Commit, Jobs
from kvstore.prefix_index import HeldChange, PrefixIndex, Seen, short
from kvstore.registry import Load, Registry, WorkerInfo, new_incarnation
from octavo.v1 import fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from kvstore.client import Broker
    from octavo.v1 import job_pb2

FINGERPRINT: Final = "bench"
TTL_MS: Final = 3_600_000
"""Of leases that nobody renews meanwhile."""
WARM_UP: Final = 20
"""Calls of each part that are not counted."""
RECORDED: Final = 32
"""Candidates in the record of a decision, at most: as a gateway has it."""
ROUNDS: Final = 5
"""The server is read so often in each part; the median counts, whatever else the machine does in one of them."""
BLOCKS_PER_CALL: Final = 4
"""Blocks that a step fills, and as many that it evicts: of 32 sequences two fill one, and a chunk of a prompt some."""


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """One run."""

    workers: int = 100
    prompt_tokens: int = 8192
    block_size: int = 16
    held: int = 2048
    """Blocks that each worker holds beside those of the prompt."""
    calls: int = 500
    """Of each part but the commits."""
    chunks: int = 32
    """Deliveries of a step, each of one token."""
    steps: int = 1000
    seed: int = 0
    server: Path | None = None
    """Of the broker; None: the packaged one."""

    @property
    def blocks(self) -> int:
        return self.prompt_tokens // self.block_size


class Bench:
    """The parts, each against the same broker. They are run in the order in which they are here."""

    def __init__(self, broker: Broker, config: IndexConfig) -> None:
        self._broker = broker
        self._config = config
        self._index = PrefixIndex(broker, lease_ttl_ms=TTL_MS)
        self._jobs = Jobs(broker, lease_ttl_ms=TTL_MS)
        self._registry = Registry(broker, lease_ttl_ms=TTL_MS)
        self._dice = random.Random(config.seed)
        self._tokens = [self._dice.randrange(50_000) for _ in range(config.prompt_tokens)]
        self._hashes = chain(root(FINGERPRINT, config.block_size), self._tokens, config.block_size)
        self.workers: list[WorkerInfo] = []

    async def populate(self) -> None:
        """Registers the workers."""
        for number in range(self._config.workers):
            info = WorkerInfo(
                id=f"worker-{number}",
                incarnation=new_incarnation(),
                model="bench",
                fingerprint=FINGERPRINT,
                block_size=self._config.block_size,
                context_length=2 * self._config.prompt_tokens + 64,
            )
            await self._registry.register(info)
            self.workers.append(info)

    async def hold(self, depths: Sequence[int]) -> None:
        """Each worker holds so many blocks of the prompt, and others besides."""
        for worker, depth in zip(self.workers, depths, strict=True):
            held = {*map(short, self._hashes[:depth])}
            held.update(self._dice.randbytes(16) for _ in range(self._config.held))
            await self._index.replace(worker.id, worker.incarnation, held)

    async def hashing(self) -> Part:
        """What the client does alone: the hashes of a prompt's blocks."""

        async def once(_: int) -> None:
            chain(root(FINGERPRINT, self._config.block_size), self._tokens, self._config.block_size)

        return await self._timed("hashes of the prompt", once, self._config.calls)

    async def matches(self) -> list[Part]:
        """For some ways in which a fleet may hold a prompt; each answer is checked."""
        blocks, count = self._config.blocks, self._config.workers
        shared = blocks // 4
        ways = {
            "match: nobody holds it": [0] * count,
            "match: all hold a quarter, some more": [
                self._dice.randrange(shared, blocks + 1) if number % 10 == 0 else shared for number in range(count)
            ],
            "match: all hold it": [blocks] * count,
            "match: each holds another part": [self._dice.randrange(1, blocks + 1) for _ in range(count)],
        }
        return [await self._match(name, depths) for name, depths in ways.items()]

    async def decisions(self) -> Part:
        """Match and submit, with the record of a decision."""
        shared = self._config.blocks // 4
        await self.hold([shared] * self._config.workers)
        jobs = self._prepared("decided")

        async def once(turn: int) -> None:
            seen = await self._index.match(self.workers, {FINGERPRINT: self._hashes})
            await self._submit(jobs[turn], self.workers[turn % len(self.workers)], self._record(seen))

        return await self._timed("match and submit", once, self._config.calls)

    async def placements(self) -> Part:
        """The same as a gateway does it: it hashes the prompt, and weighs all workers, too."""
        decisions = Decisions(self._jobs, self._registry, self._index, seed=self._config.seed)
        jobs = self._prepared("placed")

        async def once(turn: int) -> None:
            await decisions.decide(jobs[turn], self.workers)

        return await self._timed("a gateway's decision", once, self._config.calls)

    async def submissions(self) -> Part:
        """Submit alone."""
        record = self._record({worker.id: Seen(0, Load()) for worker in self.workers})
        jobs = self._prepared("submitted")

        async def once(turn: int) -> None:
            await self._submit(jobs[turn], self.workers[turn % len(self.workers)], record)

        return await self._timed("submit", once, self._config.calls)

    async def commits(self, *, index: bool) -> Part:
        """Steps of a worker whose gateway listens; with or without what its pool began and ceased to offer."""
        worker = self.workers[0]
        ids = [f"run-{index:d}-{number}" for number in range(self._config.chunks)]
        for request_id in ids:
            await self._submit(job_of(request_id, self._tokens), worker, b"")
        entries = await self._claim(worker, ids)
        filled: list[tuple[bytes, ...]] = [()]

        async def once(turn: int) -> None:
            step = [delivery(request_id, turn) for request_id in ids]
            change = None
            if index:
                new = tuple(self._dice.randbytes(16) for _ in range(BLOCKS_PER_CALL))
                change = HeldChange(added=new, removed=filled[0])
                filled[0] = new
            committed = await self._jobs.commit(worker.id, worker.incarnation, step, change, entries)
            if committed.outcomes != [Commit.WRITTEN] * len(step):
                raise AssertionError("a step was not written")

        name = f"commit of {len(ids)} tokens" + (f", {BLOCKS_PER_CALL} blocks in and out" if index else "")
        async with listening(self._broker, self._broker.keys.channel("gateway")):
            return await self._timed(name, once, self._config.steps, tokens=len(ids))

    async def _match(self, name: str, depths: Sequence[int]) -> Part:
        await self.hold(depths)

        async def once(_: int) -> None:
            seen = await self._index.match(self.workers, {FINGERPRINT: self._hashes})
            if [seen[worker.id].blocks for worker in self.workers] != depths:
                raise AssertionError("the index does not show what was written")

        return await self._timed(name, once, self._config.calls)

    async def _claim(self, worker: WorkerInfo, ids: Sequence[str]) -> list[str]:
        """The entries of `ids`, once all are claimed; what came before them is claimed too, and left alone."""
        reader = self._broker.blocking()
        claimed: dict[str, str] = {}
        while not claimed.keys() >= set(ids):
            entries = await self._jobs.next_entries(reader, worker.id, worker.incarnation, 100, 100)
            claims = await self._jobs.claim(worker.id, worker.incarnation, entries)
            claimed.update((claim.job.request_id, claim.entry_id) for claim in claims)
        await reader.aclose()
        return [claimed[request_id] for request_id in ids]

    def _prepared(self, name: str) -> list[job_pb2.Job]:
        """One job for each call of a part."""
        return [job_of(f"{name}-{turn}", self._tokens) for turn in range(WARM_UP + self._config.calls)]

    async def _submit(self, job: job_pb2.Job, worker: WorkerInfo, route: bytes) -> None:
        await self._jobs.submit(
            job,
            digest=b"bench",
            worker=worker.id,
            worker_incarnation=worker.incarnation,
            gateway="gateway",
            deadline_ms=None,
            max_queue=10**9,
            prefill=len(job.prompt_token_ids),
            route=route,
        )

    def _record(self, seen: dict[str, Seen]) -> bytes:
        """Of a decision, with every number in it."""
        record = fleet_pb2.RouteRecord(request_id="bench", policy="prefix", index="exact", answer_tokens=64)
        for worker in self.workers[:RECORDED]:
            held = seen[worker.id]
            record.candidates.add(
                worker=worker.id,
                incarnation=worker.incarnation,
                held_tokens=held.blocks * self._config.block_size,
                jobs=held.load.jobs + 1,
                tokens=held.load.tokens + 1,
                prefill_tokens=held.load.prefill + 1,
                prefill_tokens_per_s=1234.5,
                step_ms=12.5,
                sequence_ms=1.5,
                max_running=32,
                kv_tokens=32768,
                wait_s=0.1,
                prefill_s=0.2,
                decode_s=0.3,
                verdict="costlier",
            )
        return record.SerializeToString()

    async def _timed(self, name: str, once: Callable[[int], Awaitable[None]], count: int, *, tokens: int = 0) -> Part:
        """One call after the other; `tokens`: what each of them brings."""
        for turn in range(WARM_UP):
            await once(turn)
        readings, waited, turns = [await read(self._broker)], list[float](), iter(range(WARM_UP, WARM_UP + count))
        while batch := list(islice(turns, -(-count // ROUNDS))):
            for turn in batch:
                began = time.perf_counter()
                await once(turn)
                waited.append(time.perf_counter() - began)
            readings.append(await read(self._broker))
        return part(name, readings, waited, tokens)


async def run_index(config: IndexConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """All parts; what is printed as JSON. Raises KvError and FileNotFoundError where there is no server."""
    async with EmbeddedBroker(binary=config.server) as server:
        broker = await connect(BrokerConfig(server.url, "bench"))
        try:
            info = await broker.call("INFO", "server")
            bench = Bench(broker, config)
            await bench.populate()
            note(f"{config.workers} workers, prompts of {config.blocks} blocks")
            parts = [await bench.hashing(), *await bench.matches(), await bench.submissions(), await bench.decisions()]
            parts += [await bench.placements(), await bench.commits(index=False), await bench.commits(index=True)]
        finally:
            await broker.close()
    version = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    return {
        "machine": describe_machine(),
        "server": version,
        "workers": config.workers,
        "prompt_tokens": config.prompt_tokens,
        "blocks": config.blocks,
        "held_besides": config.held,
        "step_tokens": config.chunks,
        "parts": [each.as_dict() for each in parts],
    }
