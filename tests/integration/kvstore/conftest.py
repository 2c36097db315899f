"""A small stage for tests of jobs: workers, gateways and what they do, without models."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from kvstore.client import Broker, BrokerConfig, connect
from kvstore.doorbell import RECONNECTED, Doorbell
from kvstore.jobs import Claim, Commit, Entry, JobRecord, Jobs, Rehomed, Submitted, Target
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from kvstore.token_log import decode, read
from octavo.v1 import inference_pb2, job_pb2
from tests.integration.conftest import server_binary

from .proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from redis.asyncio import Redis

T = TypeVar("T")

SHORT_TTL_MS = 1000
"""Of leases in tests that wait for them to lapse."""

LONG_TTL_MS = 30_000
"""Of leases in all others: not even a busy machine makes them lapse."""

on_both_servers = pytest.mark.parametrize("broker_binary", ["embedded", "redis"], indirect=True, scope="session")
"""For what a server decides or says, and for the scripts that every job goes through; all else has the embedded one."""


@pytest.fixture(scope="session")
def broker_binary(request: pytest.FixtureRequest) -> Path:
    return server_binary(getattr(request, "param", "embedded"))


@dataclass
class Stage:
    """Jobs and registry of one process, with leases short enough to wait for."""

    broker: Broker
    jobs: Jobs
    registry: Registry
    reader: Redis
    gateway: str = field(default_factory=new_incarnation)

    async def worker(self, worker: str = "w0", *, context_length: int = 512, **more: Any) -> WorkerInfo:
        """A registered worker."""
        said: dict[str, Any] = {"model": "m", "fingerprint": "f", "context_length": context_length} | more
        info = WorkerInfo(id=worker, incarnation=new_incarnation(), **said)
        await self.registry.register(info)
        return info

    async def submit(
        self,
        request_id: str,
        worker: WorkerInfo,
        *,
        digest: bytes = b"digest",
        gateway: str | None = None,
        deadline_ms: int | None = None,
        max_queue: int = 1000,
        n: int = 1,
        prompt: Sequence[int] = (1, 2, 3),
        **routed: Any,
    ) -> Submitted:
        """A job of at most 7 new tokens for each choice. ``routed``: what ``Jobs.submit`` takes of the decision."""
        return await self.jobs.submit(
            job(request_id, n, prompt),
            digest=digest,
            worker=worker.id,
            worker_incarnation=worker.incarnation,
            gateway=self.gateway if gateway is None else gateway,
            deadline_ms=deadline_ms,
            max_queue=max_queue,
            **routed,
        )

    async def entries(self, worker: WorkerInfo, count: int = 100, block_ms: int = 200) -> list[Entry]:
        """Reads until there is something; the first read of a new stream only makes its group."""
        found: list[Entry] = []
        while not found:
            found = await self.jobs.next_entries(self.reader, worker.id, worker.incarnation, count, block_ms)
        return found

    async def claim(self, worker: WorkerInfo) -> list[Claim]:
        """Reads and claims what is there."""
        return await self.jobs.claim(worker.id, worker.incarnation, await self.entries(worker))

    async def running(self, request_id: str, worker: WorkerInfo, *, n: int = 1) -> Claim:
        """A job that was submitted and claimed."""
        await self.submit(request_id, worker, n=n)
        (claim,) = await self.claim(worker)
        assert claim.job.request_id == request_id
        return claim

    async def commit(self, worker: WorkerInfo, *step: job_pb2.Delivery) -> list[Commit]:
        """Commits one step."""
        return (await self.jobs.commit(worker.id, worker.incarnation, step)).outcomes

    async def rehome(self, target: WorkerInfo | None, *, prefill: int = 0, predicted: int = 0) -> dict[str, Rehomed]:
        """Looks for orphans once, and moves all of them to one worker; what became of each."""
        to = Target(target.id, target.incarnation, prefill, predicted) if target is not None else None
        done: dict[str, Rehomed] = {}
        for orphan in await self.jobs.orphans():
            # Those that have to wait are not read, as gateways do not.
            if to is None or await self.jobs.orphaned_job(orphan) is not None:
                done[orphan.request_id] = await self.jobs.rehome(orphan, to)
        return done

    async def record(self, request_id: str) -> JobRecord:
        """Of a job that is there."""
        record = await self.jobs.get(request_id)
        assert record is not None
        return record

    async def beat(self, worker: WorkerInfo) -> None:
        """Renews the lease until it is lost."""
        alive = True
        while alive:
            await asyncio.sleep(SHORT_TTL_MS / 8000)
            alive = (await self.registry.renew(worker)).held_lease

    async def perish(self, worker: WorkerInfo) -> None:
        """Leaves the broker as it is when a worker has not renewed its lease for longer than SHORT_TTL_MS."""
        keys = self.broker.keys
        await self.broker.call("DEL", keys.worker(worker.id))
        last_beat = await server_time_ms(self.broker) - SHORT_TTL_MS - 1
        await self.broker.call("ZADD", keys.workers, last_beat, worker.id)

    async def log(self, request_id: str) -> list[job_pb2.Delivery]:
        """The whole token log."""
        return (await read(self.broker, request_id))[0]

    async def load(self, worker: WorkerInfo) -> tuple[int, int]:
        """Jobs and tokens charged."""
        load = (await self.registry.loads([worker]))[worker.id]
        return load.jobs, load.tokens


async def server_time_ms(broker: Broker) -> int:
    """The broker's clock, milliseconds since the epoch."""
    seconds, microseconds = await broker.call("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def job(request_id: str, n: int = 1, prompt: Sequence[int] = (1, 2, 3)) -> job_pb2.Job:
    """3 prompt tokens, at most 7 new ones for each choice: with one choice a charge of 10."""
    return job_pb2.Job(
        request_id=request_id,
        model="m",
        prompt_token_ids=prompt,
        stopping=inference_pb2.Stopping(max_tokens=7),
        n=n,
    )


def chunk(
    request_id: str,
    start: int,
    token_ids: Sequence[int],
    *,
    choice: int = 0,
    attempt: int = 1,
    finish: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED,
) -> job_pb2.Delivery:
    """What a step produced for one choice of a job."""
    text = "x" * len(token_ids)
    body = inference_pb2.Chunk(choice=choice, start=start, token_ids=token_ids, text=text, finish=finish)
    return job_pb2.Delivery(request_id=request_id, attempt=attempt, chunk=body)


class Ear:
    """Hears all that is published to one incarnation."""

    def __init__(self, broker: Broker, incarnation: str) -> None:
        self._bell = Doorbell(broker)
        self._channel = broker.keys.channel(incarnation)
        self._heard: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ear:
        await self._bell.open(self._channel)
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._bell.close()

    async def next(self) -> bytes:
        """The next payload."""
        async with asyncio.timeout(5):
            return await self._heard.get()

    async def deliveries(self) -> list[job_pb2.Delivery]:
        """The next payload to a gateway."""
        return decode(await self.next())

    def silent(self) -> bool:
        """Nothing is waiting to be heard."""
        return self._heard.empty()

    async def _listen(self) -> None:
        async for payload in self._bell:
            assert payload is not RECONNECTED
            await self._heard.put(payload)


async def settled(broker: Broker) -> None:
    """A server that was just started gives leases time to be renewed."""

    async def long_up() -> bool:
        info = await broker.call("INFO", "server")
        return bool(info["uptime_in_seconds"] * 1000 > SHORT_TTL_MS + 1000)

    await until(long_up)


async def until(check: Callable[[], Awaitable[T]], *, patience_s: float = 10.0) -> T:
    """Asks until the answer is true: for what only the server's clock decides."""
    async with asyncio.timeout(patience_s):
        while True:
            if answer := await check():
                return answer
            await asyncio.sleep(0.02)


@pytest.fixture
async def stage(broker: Broker) -> AsyncIterator[Stage]:
    """Leases do not lapse."""
    async with set_stage(broker, LONG_TTL_MS) as stage:
        yield stage


@pytest.fixture
async def brief(broker: Broker) -> AsyncIterator[Stage]:
    """Leases lapse after SHORT_TTL_MS."""
    async with set_stage(broker, SHORT_TTL_MS) as stage:
        yield stage


@pytest.fixture
async def mortal(broker: Broker) -> AsyncIterator[Stage]:
    """Leases do not lapse by themselves, but who has perished is taken for dead."""
    async with set_stage(broker, LONG_TTL_MS, SHORT_TTL_MS) as stage:
        yield stage


@asynccontextmanager
async def set_stage(broker: Broker, lease_ttl_ms: int, dead_after_ms: int | None = None) -> AsyncIterator[Stage]:
    """With a client for blocking reads. Workers without a lease are taken for dead after as long as leases last, unless
    said otherwise."""
    reader = broker.blocking()
    jobs = Jobs(broker, lease_ttl_ms=dead_after_ms or lease_ttl_ms)
    registry = Registry(broker, lease_ttl_ms=lease_ttl_ms)
    try:
        yield Stage(broker, jobs, registry, reader)
    finally:
        await reader.aclose()


@pytest.fixture
async def proxy(broker_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(broker_url) as proxy:
        yield proxy


@asynccontextmanager
async def through(proxy: Proxy, broker: Broker, command_timeout_s: float) -> AsyncIterator[Stage]:
    """The stage of ``broker``'s namespace, seen through the proxy."""
    behind = await connect(BrokerConfig(proxy.url, broker.keys.namespace, command_timeout_s=command_timeout_s))
    async with set_stage(behind, LONG_TTL_MS) as stage:
        yield stage
    await behind.close()


@pytest.fixture
async def far(proxy: Proxy, broker: Broker) -> AsyncIterator[Stage]:
    """Not even a busy machine makes a command time out."""
    async with through(proxy, broker, 5.0) as stage:
        yield stage


@pytest.fixture
async def impatient(proxy: Proxy, broker: Broker) -> AsyncIterator[Stage]:
    """For tests that wait for a command to time out."""
    async with through(proxy, broker, 0.3) as stage:
        yield stage
