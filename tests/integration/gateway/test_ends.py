"""All the other ways in which a call ends: cancelled, late, failed, or with a worker that died."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.jobs import JobState
from octavo.v1 import inference_pb2, job_pb2
from octavo.v1.inference_pb2 import CANCELLED, ERROR, CancelRequest
from tests.integration.gateway.harness import (
    Client,
    chunks,
    collect,
    failed_stream,
    failure,
    request,
    tokens,
)
from tests.integration.gateway.scripted import ScriptedWorker, chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from gateway.server import Gateway
    from kvstore.client import Broker

Code = grpc.StatusCode


async def ended(worker: ScriptedWorker, request_id: str) -> int | None:
    """Waits for a job's end; its finish."""

    async def has_ended() -> bool:
        record = await worker.jobs.get(request_id)
        return record is not None and record.state is JobState.ENDED

    await until(has_ended, within_s=3)
    record = await worker.jobs.get(request_id)
    assert record is not None
    return record.finish


async def test_a_caller_who_leaves_before_the_claim(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1"))
    await call.initial_metadata()
    call.cancel()
    assert await ended(worker, "r1") == CANCELLED
    assert [(queue.undelivered, queue.pending) for queue in await worker.jobs.queues()] == [(0, 0)]


@pytest.mark.parametrize("committed", [0, 1])
async def test_a_caller_who_leaves_stops_the_work(worker: ScriptedWorker, client: Client, committed: int) -> None:
    """In prefill, and in decode."""
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    for index in range(committed):
        await worker.commit(chunk(claim, index, [10]))
        await call.read()
    began = time.monotonic()
    call.cancel()
    assert await worker.told_to_drop() == "r1"
    assert time.monotonic() - began < 0.5
    assert await ended(worker, "r1") == CANCELLED


async def test_a_caller_who_leaves_after_the_end(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.answer(claim)
    await call.read()
    call.cancel()
    assert await ended(worker, "r1") == inference_pb2.STOP
    assert worker.ended_outside.empty()


async def test_a_closed_connection_stops_all_its_work(worker: ScriptedWorker, client: Client) -> None:
    calls = [client.generate(request(f"r{index}")) for index in range(8)]
    await worker.claim(8)
    await client.channel.close()
    assert {await worker.told_to_drop() for _ in calls} == {f"r{index}" for index in range(8)}


async def test_a_job_is_kept_for_the_caller_who_stays(worker: ScriptedWorker, client: Client) -> None:
    first, second = client.generate(request("r1")), client.generate(request("r1"))
    await asyncio.gather(first.initial_metadata(), second.initial_metadata())
    (claim,) = await worker.claim()
    first.cancel()
    await worker.commit(chunk(claim, 0, [10]))
    first_response = await second.read()
    await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
    assert tokens([first_response, *await collect(second)]) == [10, 11]


async def test_cancel_ends_the_stream_with_its_reason_and_usage(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10, 11]))
    await call.read()
    assert (await client.cancel(CancelRequest(request_id="r1"))).cancelled
    (last,) = await collect(call)
    assert (last.chunks[0].finish, last.chunks[0].start) == (CANCELLED, 2)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.attempts) == (3, 2, 1)
    assert await call.code() is Code.OK
    assert await worker.told_to_drop() == "r1"


@pytest.mark.parametrize(("field", "value"), [("next:0", "-5"), ("next:0", "9" * 30), ("attempt", "9" * 30)])
async def test_a_job_that_is_damaged_while_it_runs_ends_with_what_is_wrong(
    worker: ScriptedWorker, client: Client, broker: Broker, field: str, value: str
) -> None:
    """Whose worker says nothing more of it: the gateway looks after a second of silence."""
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    await call.read()
    await broker.call("HSET", broker.keys.job("r1"), field, value)
    responses, code, told = await failed_stream(call)
    assert (code, [each.finish for each in chunks(responses)]) == (Code.INTERNAL, [ERROR])
    assert told.startswith(f"the job in the broker is damaged: b'{value}' is not 0 to ")
    assert await worker.told_to_drop() == "r1"
    assert [(queue.undelivered, queue.pending) for queue in await worker.jobs.queues()] == [(0, 0)]


async def test_cancel_is_idempotent(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1"))
    await call.initial_metadata()
    answers = [(await client.cancel(CancelRequest(request_id="r1"))).cancelled for _ in range(3)]
    assert answers == [True, False, False]
    assert not (await client.cancel(CancelRequest(request_id="never-seen"))).cancelled
    assert (await failure(client.cancel(CancelRequest(request_id=""))))[0] is Code.INVALID_ARGUMENT
    (last,) = await collect(call)
    assert last.chunks[0].finish == CANCELLED


async def test_200_cancelled_calls_leave_nothing_behind(
    worker: ScriptedWorker, gateway: Gateway, client: Client, broker: Broker
) -> None:
    """Cancelled at all points of their way: before the submission, queued, running and while output arrives."""
    settled = len(asyncio.all_tasks()) + 1  # the worker's own, for serving
    worker.serve(tokens=100)

    async def leave_after(request_id: str, seconds: float, chunks: int) -> bool:
        """Whether the job had been accepted."""
        call = client.generate(request(request_id, max_tokens=128))
        for _ in range(chunks):
            await call.read()
        await asyncio.sleep(seconds)
        call.cancel()
        return await worker.jobs.get(request_id) is not None

    accepted = 0
    for wave in range(10):
        leaving = [leave_after(f"early{wave}-{index}", 0.008 * index, 0) for index in range(15)]
        leaving += [leave_after(f"late{wave}-{index}", 0.002 * index, 1 + index) for index in range(5)]
        accepted += sum(await asyncio.gather(*leaving))
    assert 60 <= accepted < 200

    async def all_quiet() -> bool:
        left = sum(queue.undelivered + queue.pending for queue in await worker.jobs.queues())
        return left == 0 and len(asyncio.all_tasks()) <= settled

    await until(all_quiet, within_s=10)
    assert worker.ended_outside.qsize() >= 20
    assert gateway.metrics.registry.get_sample_value("octavo_streams") == 0
    loads = await worker.registry.loads([worker.info])
    assert (loads["w0"].jobs, loads["w0"].tokens) == (0, 0)
    assert len(tokens(await collect(client.generate(request("after", max_tokens=128))))) == 100


async def test_a_deadline_that_passes_in_the_queue(worker: ScriptedWorker, client: Client) -> None:
    began = time.monotonic()
    code, _ = await failure(client.generate(request("r1"), timeout=0.3))
    assert code is Code.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 1
    assert await ended(worker, "r1") == ERROR
    assert [(queue.undelivered, queue.pending) for queue in await worker.jobs.queues()] == [(0, 0)]


async def test_a_deadline_that_passes_while_running(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1"), timeout=0.5)
    (claim,) = await worker.claim()
    assert claim.remaining_ms is not None
    assert 0 < claim.remaining_ms <= 500
    await worker.commit(chunk(claim, 0, [10]))
    await call.read()
    assert (await failure(call))[0] is Code.DEADLINE_EXCEEDED
    assert await worker.told_to_drop() == "r1"


async def test_a_deadline_that_has_passed_queues_nothing(worker: ScriptedWorker, client: Client) -> None:
    code, _ = await failure(client.generate(request("r1"), timeout=0.0005))
    assert code is Code.DEADLINE_EXCEEDED

    async def nothing_queued() -> bool:
        return all(queue.undelivered + queue.pending == 0 for queue in await worker.jobs.queues())

    await until(nothing_queued, within_s=2)


@pytest.mark.parametrize(
    ("why", "code"),
    [
        (job_pb2.FAILURE_INTERNAL, Code.INTERNAL),
        (job_pb2.FAILURE_INVALID, Code.INVALID_ARGUMENT),
        (job_pb2.FAILURE_EXHAUSTED, Code.RESOURCE_EXHAUSTED),
        (job_pb2.FAILURE_DEADLINE, Code.DEADLINE_EXCEEDED),
        (job_pb2.FAILURE_DEAD, Code.INTERNAL),
    ],
)
async def test_a_failed_job_ends_its_call_with_the_matching_status(
    worker: ScriptedWorker, client: Client, why: int, code: Code
) -> None:
    call = client.generate(request())
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    await worker.commit(chunk(claim, 1, [], finish=ERROR, failure=why, error="non-finite logits"))
    responses, got, message = await failed_stream(call)
    assert (got, message) == (code, "non-finite logits")
    assert tokens(responses) == [10]
    assert responses[-1].usage.completion_tokens == 1
