"""What the intake hands over, and what it keeps back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.jobs import Jobs
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from octavo.v1 import inference_pb2, job_pb2
from worker.intake import Intake
from worker.journal import Journal

if TYPE_CHECKING:
    from kvstore.client import Broker


async def test_a_refused_write_of_an_old_attempt_costs_no_later_one(broker: Broker) -> None:
    info = WorkerInfo(
        id="w0", incarnation=new_incarnation(), model="m", fingerprint="f", block_size=16, context_length=512
    )
    await Registry(broker).register(info)
    jobs, journal = Jobs(broker), Journal("w0")
    intake = Intake(broker, "w0", info.incarnation, journal, max_running=8)
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
