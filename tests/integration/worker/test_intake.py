"""What the intake hands over, and what it keeps back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.jobs import Commit, Jobs
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from octavo.v1 import inference_pb2, job_pb2
from tests.integration.kvstore.proxy import Proxy
from tests.support.waiting import until
from worker.arrivals import NOT_YET
from worker.intake import Intake
from worker.journal import Journal
from worker.rates import UNMEASURED, Rates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.client import Broker


async def test_a_refused_write_of_an_old_attempt_costs_no_later_one(broker: Broker) -> None:
    info = WorkerInfo(
        id="w0", incarnation=new_incarnation(), model="m", fingerprint="f", block_size=16, context_length=512
    )
    await Registry(broker).register(info)
    jobs, journal = Jobs(broker), Journal("w0")
    intake = Intake(broker, "w0", info.incarnation, journal, Rates(UNMEASURED), max_running=8)
    await intake.open()
    reading = asyncio.gather(intake.read(), intake.judge())
    try:
        for name in ("owner", "entry"):
            job = job_pb2.Job(
                request_id=name, prompt_token_ids=[1, 2], n=1, stopping=inference_pb2.Stopping(max_tokens=3)
            )
            await jobs.submit(
                job,
                digest=b"d",
                worker="w0",
                worker_incarnation=info.incarnation,
                gateway="g",
                deadline_ms=None,
                max_queue=8,
            )
            await asyncio.wait_for(intake.news.wait(), 10)
            # Nothing of it was written yet: what was refused is of a job that had the id before.
            intake.drop(name, 1)
            claims, ended = intake.take()
            assert ([claim.job.request_id for claim in claims], ended) == ([name], set())
            claims[0].job.sampling.CopyFrom(inference_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1))
            journal.open(claims[0], now=0.0)
            # Nor is it when the job is still ours, as the broker has it: what was refused is of another life of the id.
            intake.drop(name, 1)
            await asyncio.wait_for(intake._refused.join(), 10)
            assert intake.take() == ([], set())
            was = await broker.call("HGET", broker.keys.job(name), name)
            await broker.call("HSET", broker.keys.job(name), name, "another")
            intake.drop(name, 1)
            await asyncio.wait_for(intake._refused.join(), 10)
            assert intake.take() == ([], {name})
            journal.drop(name)
            await broker.call("HSET", broker.keys.job(name), name, was)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await intake.close()


class World:
    """A worker's intake that reads, and what it has read."""

    def __init__(self, broker: Broker, info: WorkerInfo) -> None:
        self.jobs, self.journal, self.info = Jobs(broker), Journal("w0"), info
        self.intake = Intake(broker, "w0", info.incarnation, self.journal, Rates(UNMEASURED), max_running=8)

    async def submit(self, name: str, prompt: int, priority: int = 0) -> None:
        job = job_pb2.Job(request_id=name, prompt_token_ids=[1] * prompt, n=1, priority=priority)
        job.stopping.max_tokens = 3
        job.sampling.CopyFrom(inference_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1))
        await self.jobs.submit(
            job,
            digest=b"d",
            worker="w0",
            worker_incarnation=self.info.incarnation,
            gateway="g",
            deadline_ms=None,
            max_queue=16,
        )

    async def read(self, names: list[str], since: int = 0) -> None:
        """Waits until these are read. ``since``: of what is read from now on."""

        async def has_read() -> bool:
            for claim in self.intake.take()[0]:
                self.journal.open(claim, now=0.0, since=since)
                self.intake.update_room()
            return [*self.journal.running] == names

        await until(has_read, within_s=10)

    async def end(self, name: str) -> None:
        """As the committer does it, which tells nobody yet."""
        job = self.journal.running[name]
        chunk = inference_pb2.Chunk(token_ids=[1], finish=inference_pb2.LENGTH)
        last = job_pb2.Delivery(request_id=name, attempt=job.claim.attempt, chunk=chunk)
        committed = await self.jobs.commit("w0", self.info.incarnation, [last], None, [job.claim.entry_id])
        assert committed.outcomes == [Commit.WRITTEN]

    def start(self, *names: str) -> None:
        """These have their first tokens."""
        for name in names:
            self.journal.running[name].started = True
        self.intake.update_room()


@asynccontextmanager
async def reading(broker: Broker, jobs: dict[str, int]) -> AsyncIterator[World]:
    """``jobs``: those that wait already, with how long their prompts are."""
    info = WorkerInfo(
        id="w0", incarnation=new_incarnation(), model="m", fingerprint="f", block_size=16, context_length=4096
    )
    await Registry(broker, lease_ttl_ms=60_000).register(info)
    world = World(broker, info)
    for name, prompt in jobs.items():
        await world.submit(name, prompt)
    await world.intake.open()
    tasks = [asyncio.create_task(part) for part in (world.intake.read(), world.intake.listen())]
    try:
        yield world
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await world.intake.close()


@pytest.mark.parametrize(("prompt", "read"), [(3, 12), (999, 4), (2001, 4)])
async def test_long_prompts_wait_in_redis(broker: Broker, prompt: int, read: int) -> None:
    """Of 12 jobs all are read, or the few that always are, while those that were read have not started."""
    names = [f"r{index}" for index in range(12)]
    async with reading(broker, dict.fromkeys(names, prompt)) as world:
        await world.read(names[:read])
        assert world.intake.full.is_set() is (read < 12)
        world.start(*names[:read])
        await world.read(names[: read + 4])


async def test_a_few_jobs_are_read_however_long_the_prompts_before_them_are(broker: Broker) -> None:
    """Else a high priority behind two long prompts would wait in Redis, where the scheduler does not see it."""
    names = ["a", "b", "high", "c", "d"]
    async with reading(broker, {"a": 4000, "b": 4000}) as world:
        await world.read(names[:2])
        assert not world.intake.full.is_set()
        await world.submit("high", 3, priority=9)
        await world.read(names[:3])
        assert world.journal.running["high"].claim.job.priority == 9
        for name in names[3:]:
            await world.submit(name, 4000)
        await world.read(names[:4])
        assert world.intake.full.is_set()
        world.start("high")
        await world.read(names)


async def test_jobs_whose_pages_are_fetched_keep_nobody_busy(broker: Broker) -> None:
    names = [f"r{index}" for index in range(12)]
    async with reading(broker, dict.fromkeys(names, 2001)) as world:
        await world.read(names, since=NOT_YET)
        assert not world.intake.full.is_set()


async def ring(broker: Broker, world: World, *names: str) -> None:
    """Returns once the worker has heard of these, in order, and made up its mind."""
    channel = broker.keys.channel(world.info.incarnation)
    for name in (*names, "nobody"):
        await broker.call("PUBLISH", channel, name)

    async def heard() -> bool:
        return "nobody" in world.intake._rung

    await until(heard, within_s=10)
    del world.intake._rung["nobody"]


async def test_a_job_that_was_moved_elsewhere_is_let_go(broker: Broker) -> None:
    """And an old word of that does not end what came back."""
    async with reading(broker, {"first": 3}) as world:
        await world.read(["first"])
        await ring(broker, world, "first")
        assert world.intake.take() == ([], set())
        await broker.call("HSET", broker.keys.job("first"), "owner", "another")
        await ring(broker, world, "first")
        assert world.intake.take() == ([], {"first"})
        world.journal.drop("first")
        # As it is once a reaper has moved it back here, and the word of the first move is late.
        await world.submit("back", 3)
        await world.read(["back"])
        job = broker.keys.job("back")
        await broker.call("HSET", job, "attempt", 3)
        world.journal.running["back"].claim = replace(world.journal.running["back"].claim, attempt=3)
        await ring(broker, world, "back")
        assert world.intake.take() == ([], set())
        await broker.call("HSET", job, "owner", "another")
        await ring(broker, world, "back")
        assert world.intake.take() == ([], {"back"})


async def test_whoever_is_told_to_stop_reads_no_more(broker: Broker) -> None:
    async with reading(broker, {"first": 3}) as world:
        await world.read(["first"])
        world.intake.stop()

        async def stopped() -> bool:
            return world.intake.stopped

        await until(stopped, within_s=10)
        await world.submit("later", 3)
        (queue,) = await world.jobs.queues()
        assert (queue.undelivered, queue.pending) == (1, 1)
        world.intake.update_room()
        assert not world.intake.full.is_set()


async def test_an_outage_of_the_broker_is_two_lines_in_the_log(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often reading is tried meanwhile."""
    monkeypatch.setattr("worker.intake.RETRY_S", 0.001)
    info = WorkerInfo(
        id="w0", incarnation=new_incarnation(), model="m", fingerprint="f", block_size=16, context_length=512
    )
    async with Proxy(broker.config.url) as proxy:
        cut_off = await connect(BrokerConfig(proxy.url, broker.config.namespace))
        await Registry(cut_off).register(info)
        intake = Intake(cut_off, "w0", info.incarnation, Journal("w0"), Rates(UNMEASURED), max_running=8)
        await intake.open()
        reading = asyncio.create_task(intake.read())
        upstream, proxy.upstream = proxy.upstream, "redis://127.0.0.1:1"

        def told() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.name == "worker.intake"]

        async def tried_often() -> bool:
            return proxy.accepted - before >= 20

        async def again() -> bool:
            return len(told()) > 1

        try:
            with caplog.at_level(logging.INFO):
                before = proxy.accepted
                proxy.cut()
                await until(tried_often, within_s=20)
                (line,) = told()
                assert line.startswith("reading jobs fails, trying again: ")
                proxy.upstream = upstream
                await until(again, within_s=20)
                assert len(told()) == 2
                assert told()[1].startswith("reading jobs works again, after ")
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            await intake.close()
            await cut_off.close()
