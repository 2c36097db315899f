"""Many at once: each job gets one last delivery, whoever writes it, and load and stream end at nothing."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from kvstore.client import connect
from kvstore.errors import RequestIdTaken
from kvstore.jobs import Commit, Finished, Jobs, Submitted
from kvstore.registry import new_incarnation
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Ear, Stage, chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo

JOBS = 40


@pytest.fixture
async def crowd(broker: Broker) -> AsyncIterator[list[Jobs]]:
    """Several processes' worth of Jobs."""
    brokers = [await connect(broker.config) for _ in range(4)]
    yield [Jobs(one) for one in brokers]
    for one in brokers:
        await one.close()


async def test_one_end_for_each_job(stage: Stage, broker: Broker, crowd: list[Jobs]) -> None:
    dice = random.Random(7)
    worker = await stage.worker()
    ids = [f"r{number}" for number in range(JOBS)]
    async with Ear(broker, stage.gateway) as ear:
        for request_id in ids:
            await stage.submit(request_id, worker)
        await stage.claim(worker)
        ways = [way for request_id in ids for way in _ways_to_end(request_id, worker, crowd)]
        dice.shuffle(ways)
        results = await asyncio.gather(*ways)

        heard = [(await ear.deliveries())[0] for _ in ids]
        assert ear.silent()
    ends = [result for result in results if result in (Finished.ENDED, Commit.WRITTEN)]
    assert len(ends) == JOBS
    # Of one commit's retries, the first may be written and the others find it.
    assert set(results) <= {Finished.ENDED, Finished.ALREADY, Commit.WRITTEN, Commit.DUPLICATE, Commit.FENCED}
    assert sorted(delivery.request_id for delivery in heard) == sorted(ids)
    for request_id in ids:
        log = await stage.log(request_id)
        assert len(log) == 1, request_id
        assert log[0] in heard
        record = await stage.record(request_id)
        assert (record.state, record.finish) == ("ended", log[0].chunk.finish)
    assert await stage.load(worker) == (0, 0)
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 0


def _ways_to_end(request_id: str, worker: WorkerInfo, crowd: list[Jobs]) -> list[asyncio.Future[Finished | Commit]]:
    last = chunk(request_id, 0, [1], finish=inference_pb2.STOP)

    async def commit(jobs: Jobs) -> Commit:
        return (await jobs.commit(worker.id, worker.incarnation, [last])).outcomes[0]

    async def deadline(jobs: Jobs) -> Finished:
        return await jobs.finish(
            request_id, finish=inference_pb2.ERROR, failure=job_pb2.FAILURE_DEADLINE, error="", expect_attempt=1
        )

    ways = [way(jobs) for jobs in crowd for way in (commit, deadline)] + [jobs.cancel(request_id) for jobs in crowd]
    return [asyncio.ensure_future(way) for way in ways]


async def test_streams_that_are_cancelled_have_no_gap(stage: Stage, crowd: list[Jobs]) -> None:
    """A worker commits token after token while its jobs are cancelled: what is in the log is a prefix and one end."""
    worker = await stage.worker()
    ids = [f"r{number}" for number in range(JOBS)]
    for request_id in ids:
        await stage.submit(request_id, worker)
    await stage.claim(worker)

    async def generate() -> None:
        live = list(ids)
        for index in range(60):
            step = [chunk(request_id, index, [index]) for request_id in live]
            results = await stage.commit(worker, *step)
            live = [one for one, result in zip(live, results, strict=True) if result is Commit.WRITTEN]

    async def cancel(number: int) -> Finished:
        await asyncio.sleep(number * 0.002)
        return await crowd[number % len(crowd)].cancel(ids[number])

    _, *answers = await asyncio.gather(generate(), *(cancel(number) for number in range(JOBS)))
    assert answers == [Finished.ENDED] * JOBS
    for request_id in ids:
        *tokens, end = await stage.log(request_id)
        assert [delivery.chunk.start for delivery in tokens] == list(range(len(tokens)))
        assert end.chunk.finish == inference_pb2.CANCELLED
        record = await stage.record(request_id)
        assert record.next == {0: len(tokens)}


async def test_choices_that_end_while_their_job_is_cancelled(stage: Stage, crowd: list[Jobs]) -> None:
    """What is in the log: of each choice a prefix, and an end by the worker or the one that ends all others."""
    worker = await stage.worker()
    ids, n, length = [f"r{number}" for number in range(JOBS)], 3, 12
    for request_id in ids:
        await stage.submit(request_id, worker, n=n)
    await stage.claim(worker)

    async def generate() -> None:
        live = [(request_id, choice) for request_id in ids for choice in range(n)]
        for index in range(length):
            step = []
            for request_id, choice in live:
                last = index == length - 1 - choice
                finish = inference_pb2.STOP if last else inference_pb2.FINISH_REASON_UNSPECIFIED
                step.append(chunk(request_id, index, [index], choice=choice, finish=finish))
            results = await stage.commit(worker, *step)
            live = [
                one
                for one, delivery, result in zip(live, step, results, strict=True)
                if result is Commit.WRITTEN and not delivery.chunk.finish
            ]

    generating = asyncio.create_task(generate())

    async def cancel(number: int) -> Finished:
        await (asyncio.sleep(number * 0.002) if number < JOBS - 5 else asyncio.wait([generating]))
        return await crowd[number % len(crowd)].cancel(ids[number])

    answers = await asyncio.gather(*(cancel(number) for number in range(JOBS)))
    await generating
    assert set(answers) == {Finished.ENDED, Finished.ALREADY}
    for request_id, answer in zip(ids, answers, strict=True):
        log = await stage.log(request_id)
        outside = [delivery for delivery in log if delivery.chunk.finish == inference_pb2.CANCELLED]
        assert outside == ([log[-1]] if answer is Finished.ENDED else [])
        record = await stage.record(request_id)
        assert record.state == "ended"
        for choice in range(n):
            mine = [each.chunk for each in log if each.chunk.choice == choice and each not in outside]
            assert [each.start for each in mine] == list(range(record.next[choice]))
            ends = [each for each in mine if each.finish]
            assert ends == ([mine[-1]] if choice in record.ends else [])
        assert outside or len(record.ends) == n
    assert await stage.load(worker) == (0, 0)


async def test_one_job_for_one_request_id(stage: Stage, broker: Broker, crowd: list[Jobs]) -> None:
    worker = await stage.worker()

    async def submit(number: int) -> Submitted | str:
        same = number % 3 != 0
        try:
            return await crowd[number % 4].submit(
                _job(),
                digest=b"one" if same else b"two",
                worker=worker.id,
                worker_incarnation=worker.incarnation,
                gateway=new_incarnation(),
                deadline_ms=None,
                max_queue=100,
            )
        except RequestIdTaken:
            return "taken"

    answers = await asyncio.gather(*(submit(number) for number in range(30)))
    assert answers.count(Submitted.ACCEPTED) == 1
    assert {answers.count(Submitted.ATTACHED), answers.count("taken")} in ({19, 10}, {9, 20})
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 1
    assert await stage.load(worker) == (1, 2)


def _job() -> job_pb2.Job:
    return job_pb2.Job(request_id="r1", prompt_token_ids=[1], stopping=inference_pb2.Stopping(max_tokens=1))
