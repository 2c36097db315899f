"""What the intake hands over, and what it keeps back."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.jobs import Jobs
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from octavo.v1 import inference_pb2, job_pb2
from tests.integration.kvstore.proxy import Proxy
from tests.support.waiting import until
from worker.intake import Intake
from worker.journal import Journal
from worker.rates import UNMEASURED, Rates

if TYPE_CHECKING:
    from kvstore.client import Broker


async def test_a_refused_write_of_an_old_attempt_costs_no_later_one(broker: Broker) -> None:
    info = WorkerInfo(
        id="w0", incarnation=new_incarnation(), model="m", fingerprint="f", block_size=16, context_length=512
    )
    await Registry(broker).register(info)
    jobs, journal = Jobs(broker), Journal("w0")
    intake = Intake(broker, "w0", info.incarnation, journal, Rates(UNMEASURED), max_running=8)
    await intake.open()
    reading = asyncio.create_task(intake.read())
    try:
        for name, fenced in (("later", 0), ("same", 1)):
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
            intake.drop(name, fenced)
            claims, ended = intake.take()
            assert [claim.job.request_id for claim in claims] == (["later"] if fenced == 0 else [])
            assert ended == set()
            if fenced:
                continue
            # The same once it runs.
            sampling = inference_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1)
            claims[0].job.sampling.CopyFrom(sampling)
            journal.open(claims[0], now=0.0)
            intake.drop(name, 0)
            assert intake.take() == ([], set())
            intake.drop(name, 1)
            assert intake.take() == ([], {name})
            journal.drop(name)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await intake.close()


@pytest.mark.parametrize(("prompt", "read"), [(3, 12), (999, 4), (2001, 4)])
async def test_long_prompts_wait_in_redis(broker: Broker, prompt: int, read: int) -> None:
    """Of 12 jobs all are read, or no more than one read brings, while those that were read have not started."""
    info = WorkerInfo(
        id="w0", incarnation=new_incarnation(), model="m", fingerprint="f", block_size=16, context_length=4096
    )
    await Registry(broker, lease_ttl_ms=60_000).register(info)
    jobs, journal = Jobs(broker), Journal("w0")
    for index in range(12):
        job = job_pb2.Job(request_id=f"r{index}", prompt_token_ids=[1] * prompt, n=1)
        job.stopping.max_tokens = 3
        job.sampling.CopyFrom(inference_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1))
        await jobs.submit(
            job,
            digest=b"d",
            worker="w0",
            worker_incarnation=info.incarnation,
            gateway="g",
            deadline_ms=None,
            max_queue=16,
        )
    intake = Intake(broker, "w0", info.incarnation, journal, Rates(UNMEASURED), max_running=8)
    await intake.open()
    reading = asyncio.create_task(intake.read())

    async def has_read(count: int) -> bool:
        for claim in intake.take()[0]:
            journal.open(claim, now=0.0)
        return len(journal.running) == count

    try:
        await until(lambda: has_read(read), within_s=10)
        assert intake.full.is_set() is (read < 12)
        for job_read in [*journal.running.values()]:
            job_read.started = True  # they have their first tokens
        intake.update_room()
        await until(lambda: has_read(min(read + 4, 12)), within_s=10)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await intake.close()


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
