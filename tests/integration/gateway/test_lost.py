"""Jobs that the broker has lost: they are submitted again under the same id, and their callers see no difference."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from gateway import resubmission
from gateway.output import MAX_RESTARTS
from kvstore.registry import READY
from octavo.v1.inference_pb2 import STOP, AttachRequest
from tests.integration.gateway.harness import (
    answers,
    chunks,
    collect,
    failure,
    fleet,
    fleet_of_its_own,
    lose,
    request,
    running_gateway,
    tokens,
)
from tests.integration.gateway.scripted import ScriptedWorker, chunk, tiny_card
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.server import Gateway
    from kvstore.client import Broker
    from tests.integration.gateway.harness import Client

GONE = (grpc.StatusCode.UNAVAILABLE, "the job is no longer in the broker")


def resubmitted(gateway: Gateway) -> float | None:
    return gateway.metrics.registry.get_sample_value("octavo_resubmitted_total")


async def test_a_stream_goes_on_where_it_was(worker: ScriptedWorker, gateway: Gateway, client: Client) -> None:
    call = client.generate(request("r1", n=2))
    (claim,) = await worker.claim()
    await worker.commit(
        chunk(claim, 0, [10]), chunk(claim, 1, [11]), chunk(claim, 0, [20], choice=1, finish=STOP, used=3)
    )
    had = [await call.read()]
    while sum(len(each.token_ids) for each in chunks(had)) < 3:
        had.append(await call.read())
    await lose(worker, "r1")
    (again,) = await asyncio.wait_for(worker.claim(), 5)
    assert again.job == claim.job  # the seed too, which nobody chose
    assert again.job.sampling.HasField("seed")
    await worker.commit(chunk(again, 0, [20], choice=1, finish=STOP, used=1), chunk(again, 0, [10]))
    await worker.commit(chunk(again, 1, [11]), chunk(again, 2, [12], finish=STOP, used=4))
    responses = [*had, *await asyncio.wait_for(collect(call), 5)]
    assert answers(responses, 2) == [[10, 11, 12], [20]]
    assert (responses[-1].usage.completion_tokens, responses[-1].usage.attempts) == (4, 2)
    assert resubmitted(gateway) == 1


async def test_all_is_lost_and_nobody_notices(broker_binary: Path) -> None:
    async with fleet_of_its_own(broker_binary) as (_, worker, client):
        calls = [client.generate(request(f"r{index}")) for index in range(8)]
        for call in calls:
            await call.initial_metadata()
        claims = await worker.claim(4)
        await worker.commit(*(chunk(claim, 0, [2]) for claim in claims))
        await worker.broker.call("FLUSHALL")
        worker.serve()
        for responses in await asyncio.wait_for(asyncio.gather(*map(collect, calls)), 15):
            assert tokens(responses) == [2, 3, 4]


async def test_a_job_that_is_lost_again_and_again_is_given_up(
    worker: ScriptedWorker, gateway: Gateway, client: Client
) -> None:
    call = client.generate(request("r1"))
    for _ in range(MAX_RESTARTS + 1):
        await asyncio.wait_for(worker.claim(), 5)
        await lose(worker, "r1")
    assert await asyncio.wait_for(failure(call), 5) == GONE
    assert resubmitted(gateway) == MAX_RESTARTS


async def test_who_attached_to_a_job_submits_it_again_if_it_knows_what_was_asked(
    worker: ScriptedWorker, client: Client, broker: Broker
) -> None:
    """A second Generate does, and makes the same job of it; an Attach does not: its caller is told to come again."""
    first = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    await first.read()
    async with running_gateway(broker) as (gateway, _, other):
        second, third = other.generate(request("r1")), other.attach(AttachRequest(request_id="r1", after={0: 1}))
        assert list((await second.read()).chunks[0].token_ids) == [10]
        await third.initial_metadata()
        first.cancel()
        await lose(worker, "r1")
        (again,) = await asyncio.wait_for(worker.claim(), 5)
        assert again.job == claim.job
        # It may have seen the job that the other call has brought back, and then it goes on with that.
        going_on = asyncio.create_task(outcome(third))
        await worker.commit(chunk(again, 0, [10]), chunk(again, 1, [11], finish=STOP))
        (last,) = await asyncio.wait_for(collect(second), 5)
        assert list(last.chunks[0].token_ids) == [11]
        assert await asyncio.wait_for(going_on, 5) in ([11], GONE)
        assert resubmitted(gateway) == 1


async def test_two_answers_do_not_become_one(
    worker: ScriptedWorker, client: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker of another kind, which gets the job where none of the first kind comes back."""
    monkeypatch.setattr(resubmission, "SAME_KIND_S", 0.3)
    other = ScriptedWorker(broker, "w1", card=tiny_card("g" * 16))
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10, 11]))
    assert list((await call.read()).chunks[0].token_ids) == [10, 11]
    await other.start()
    await worker.drain()
    await lose(worker, "r1")
    (again,) = await asyncio.wait_for(other.claim(), 5)
    assert again.job == claim.job
    await other.commit(chunk(again, 0, [10]), chunk(again, 1, [99]), chunk(again, 2, [12]))
    different = "choice 0 of the job was run anew, and gave another answer"
    assert await asyncio.wait_for(failure(call), 5) == (grpc.StatusCode.DATA_LOSS, different)
    assert await other.told_to_drop() == "r1"
    await other.stop()


@pytest.mark.parametrize("attached", [False, True])
async def test_a_job_with_output_waits_for_the_kind_that_gave_it(
    worker: ScriptedWorker, client: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch, attached: bool
) -> None:
    """Whoever brings it back: who submitted it, or who asked for the same later, elsewhere."""
    looks = 0
    find = resubmission.Looks.find

    async def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return await find(*args)

    async def looked_twice() -> bool:
        return looks >= 2

    monkeypatch.setattr(resubmission.Looks, "find", counted)
    other = ScriptedWorker(broker, "w1", card=tiny_card("g" * 16))
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    async with running_gateway(broker) as (_, _, elsewhere):
        if attached:
            first, call = call, elsewhere.generate(request("r1"))
        assert list((await call.read()).chunks[0].token_ids) == [10]
        if attached:
            first.cancel()
        await other.start()
        await worker.drain()
        await lose(worker, "r1")
        await until(looked_twice, within_s=10)
        worker.info = replace(worker.info, state=READY)
        await worker.registry.renew(worker.info)
        (again,) = await asyncio.wait_for(worker.claim(), 10)
        assert again.job == claim.job
        await worker.commit(chunk(again, 0, [10]), chunk(again, 1, [11], finish=STOP))
        (last,) = await asyncio.wait_for(collect(call), 5)
        assert list(last.chunks[0].token_ids) == [11]
    await other.stop()


async def test_full_queues_do_not_refuse_a_job_that_was_accepted(broker: Broker) -> None:
    worker = ScriptedWorker(broker)
    async with fleet(broker, worker, max_queue=1) as client:
        first = client.generate(request("r1"))
        (claim,) = await worker.claim()
        await lose(worker, "r1")
        # The place that it had is taken before its gateway notices.
        second = client.generate(request("r2"))
        await second.initial_metadata()
        claims = {each.job.request_id: each for each in await worker.claim(2)}
        assert claims["r1"].job == claim.job
        for each in claims.values():
            await worker.answer(each)
        for call in (first, second):
            assert tokens(await collect(call)) == [2, 3, 4]


async def outcome(call: Any) -> Any:
    """Its tokens, or how it failed."""
    try:
        return [token for each in chunks(await collect(call)) for token in each.token_ids]
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


async def test_a_lost_job_waits_for_a_worker(broker: Broker) -> None:
    worker, other = ScriptedWorker(broker), ScriptedWorker(broker, "w1")
    async with fleet(broker, worker) as client:
        call = client.generate(request("r1"))
        await worker.claim()
        await worker.stop()
        await broker.call("DEL", broker.keys.job("r1"), broker.keys.log("r1"), broker.keys.jobs("w0"))
        await other.start()
        (claim,) = await asyncio.wait_for(other.claim(), 10)
        await other.answer(claim)
        assert tokens(await collect(call)) == [2, 3, 4]
        await other.stop()
        await worker.start()


@pytest.mark.parametrize("detached", [False, True])
async def test_a_caller_who_leaves_while_its_job_is_submitted_again_leaves_none(
    worker: ScriptedWorker, gateway: Gateway, client: Client, detached: bool
) -> None:
    call = client.generate(request("r1", detached=detached))
    await worker.claim()
    await lose(worker, "r1")
    (claim,) = await asyncio.wait_for(worker.claim(), 5)
    call.cancel()
    if detached:
        await worker.answer(claim)
        assert tokens(await collect(client.generate(request("r1", detached=True)))) == [2, 3, 4]
    else:
        assert await worker.told_to_drop() == "r1"
