"""What strikes the broker, on real servers: jobs of the real protocol are there, or lost, as it should be."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from bench.chaos.duplicates import STRANGER, duplicate
from bench.chaos.nemesis import Nemesis
from bench.chaos.schedule import BROKER, Fault, Kind
from kvstore.client import Broker, BrokerConfig, connect
from kvstore.errors import BrokerUnreachable
from kvstore.jobs import Claim, Jobs, Submitted
from kvstore.keys import GROUP
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from octavo.v1 import inference_pb2, job_pb2
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.chaos.proxy import Proxy
    from bench.chaos.server import Server


class Nobody:
    """No processes."""

    workers: tuple[str, ...] = ()

    async def until_back(self, name: str, pid: int) -> None:
        raise TimeoutError

    def pid(self, name: str) -> int | None:
        return None


class Workers:
    """Registered ones, whose jobs the test reads."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.jobs = Jobs(broker)
        self.infos = [
            WorkerInfo(id=name, incarnation=new_incarnation(), model="m", fingerprint="f", context_length=64)
            for name in ("w0", "w1")
        ]

    async def register(self) -> None:
        for info in self.infos:
            await Registry(self.broker, lease_ttl_ms=60_000).register(info)

    async def submit(self, request_id: str) -> Submitted:
        job = job_pb2.Job(
            request_id=request_id, model="m", prompt_token_ids=[1], stopping=inference_pb2.Stopping(max_tokens=4), n=1
        )
        return await self.jobs.submit(
            job,
            digest=b"d",
            worker="w0",
            worker_incarnation=self.infos[0].incarnation,
            gateway="g",
            deadline_ms=None,
            max_queue=9999,
        )

    async def claim(self) -> list[Claim]:
        reader = self.broker.blocking()
        try:
            info = self.infos[0]
            entries = []
            while not entries:  # the first read makes the group
                entries = await self.jobs.next_entries(reader, info.id, info.incarnation, 9, 200)
            return await self.jobs.claim(info.id, info.incarnation, entries)
        finally:
            await reader.aclose()


@pytest.fixture
async def workers(proxy: Proxy, namespace: str) -> AsyncIterator[Workers]:
    broker = await connect(BrokerConfig(proxy.url, namespace, retries=8))
    workers = Workers(broker)
    await workers.register()
    yield workers
    await broker.close()


@pytest.fixture
def nemesis(server: Server, proxy: Proxy, namespace: str) -> Nemesis:
    return Nemesis(processes=Nobody(), server=server, proxies={"w0": proxy}, namespace=namespace, seed=0)


async def strike(nemesis: Nemesis, kind: Kind, duration_s: float = 0.0) -> str:
    async with asyncio.timeout(30):
        (struck,) = await nemesis.run([Fault(0.0, kind, BROKER, duration_s)])
    return struck.outcome


async def test_killed_it_comes_back_with_all_that_it_answered_for(workers: Workers, nemesis: Nemesis) -> None:
    assert await workers.submit("r") is Submitted.ACCEPTED
    assert await strike(nemesis, Kind.BROKER_KILL, 0.1) == "done"
    assert await workers.submit("r") is Submitted.ATTACHED


async def test_torn_it_lacks_the_last_of_it(
    workers: Workers, nemesis: Nemesis, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, kill = asyncio.Event(), server.kill

    async def noted(*, lose_s: float = 0.0) -> None:
        begun.set()
        await kill(lose_s=lose_s)

    monkeypatch.setattr(server, "kill", noted)
    assert await workers.submit("early") is Submitted.ACCEPTED
    tearing = asyncio.create_task(strike(nemesis, Kind.BROKER_TORN, 1.2))
    await begun.wait()
    assert await workers.submit("late") is Submitted.ACCEPTED
    assert await tearing == "done"
    assert await workers.submit("early") is Submitted.ATTACHED
    assert await workers.submit("late") is Submitted.ACCEPTED
    assert server.running


@pytest.mark.parametrize("kind", [Kind.BROKER_FLUSH, Kind.BROKER_LOSS])
async def test_emptied_it_knows_nothing(workers: Workers, nemesis: Nemesis, kind: Kind) -> None:
    assert await workers.submit("r") is Submitted.ACCEPTED
    assert await strike(nemesis, kind, 0.1 if kind is Kind.BROKER_LOSS else 0.0) == "done"
    assert await workers.jobs.get("r") is None
    await workers.register()
    assert await workers.submit("r") is Submitted.ACCEPTED


async def test_paused_it_answers_nobody_for_a_time(proxy: Proxy, nemesis: Nemesis, namespace: str) -> None:
    impatient = await connect(BrokerConfig(proxy.url, namespace, retries=0, command_timeout_s=0.3))
    pausing = asyncio.create_task(strike(nemesis, Kind.BROKER_PAUSE, 1.5))

    async def silent() -> bool:
        try:
            await impatient.call("PING")
        except BrokerUnreachable:
            return True
        return False

    await until(silent, within_s=5)
    assert not pausing.done()
    assert await pausing == "done"
    async with asyncio.timeout(5):
        while await silent():
            pass
    await impatient.close()


async def test_a_reply_is_lost_and_the_write_is_done_once(
    workers: Workers, nemesis: Nemesis, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await workers.submit("first")  # loads the script
    monkeypatch.setattr("bench.chaos.nemesis.WRITES", ("submit",))
    losing = asyncio.create_task(strike(nemesis, Kind.LOST_REPLY))
    sent = 0
    while not proxy.lost:
        sent += 1
        assert await workers.submit(f"r{sent}") is Submitted.ACCEPTED
    assert await losing == "done: of submit, by w0"
    assert await workers.broker.call("XLEN", workers.broker.keys.jobs("w0")) == 1 + sent
    assert workers.broker.retried >= 1


async def test_connections_are_closed(workers: Workers, nemesis: Nemesis, proxy: Proxy) -> None:
    before = proxy.connections
    assert await strike(nemesis, Kind.RESET) == "done"
    await workers.submit("r")
    assert proxy.connections > before


class TestDuplicates:
    async def test_nobody_runs_a_job(self, workers: Workers, nemesis: Nemesis) -> None:
        await workers.submit("queued")
        assert await strike(nemesis, Kind.DUPLICATE) == "skipped: nobody runs a job"

    async def test_each_way(self, workers: Workers) -> None:
        broker, keys = workers.broker, workers.broker.keys
        await workers.submit("r")
        await workers.claim()
        # The other worker's stream is there once somebody has read it.
        await broker.call("XGROUP", "CREATE", keys.jobs("w1"), GROUP, "0", "MKSTREAM")
        done = [await duplicate(broker, random.Random(seed)) for seed in range(12)]
        assert {
            "r: its entry of w0 given to another consumer",
            "r of w0 put into the stream of w0",
            "r of w0 put into the stream of w1",
        } == set(done)
        assert await broker.call("XLEN", keys.jobs("w1")) == sum("of w1" in each for each in done)
        assert await broker.call("XLEN", keys.jobs("w0")) == 1 + sum("stream of w0" in each for each in done)
        consumers = await broker.call("XINFO CONSUMERS", keys.jobs("w0"), GROUP)
        assert {each["name"]: each["pending"] for each in consumers}[STRANGER.encode()] == 1

    async def test_delivered_again_a_job_is_not_started_again(self, workers: Workers) -> None:
        await workers.submit("r")
        (claim,) = await workers.claim()
        seed = next(seed for seed in range(99) if _way(seed) == "again")
        assert await duplicate(workers.broker, random.Random(seed)) == "r of w0 put into the stream of w0"
        assert claim.attempt == 1
        assert await workers.claim() == []
        assert await workers.broker.call("XLEN", workers.broker.keys.jobs("w0")) == 1


def _way(seed: int) -> str:
    """What ``duplicate`` does with this seed when one job is run and there are two workers."""
    numbers = random.Random(seed)
    numbers.choice(["the only one"])
    return numbers.choice(("claim", "again", "elsewhere"))
