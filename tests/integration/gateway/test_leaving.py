"""Callers who leave, by closing their call or by name: what ends says so, and nobody else's job does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from gateway import client as product
from octavo.v1.inference_pb2 import CANCELLED, STOP, AttachRequest, CancelRequest
from tests.integration.gateway.harness import Client, chunks, collect, failure, request, running_gateway, tokens
from tests.integration.gateway.scripted import chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from kvstore.client import Broker
    from tests.integration.gateway.scripted import ScriptedWorker


async def left(client: Client, caller: str) -> bool:
    """Whether that caller's leaving has ended the job."""
    response = await client.cancel(CancelRequest(request_id="r1", caller=caller))
    return bool(response.cancelled)


@pytest.mark.parametrize(("caller", "abandoned"), [("one", True), ("", False)])
async def test_an_end_says_whether_somebody_cancelled_the_job_or_left_it(
    worker: ScriptedWorker, client: Client, caller: str, abandoned: bool
) -> None:
    call = client.generate(request("r1", n=2, caller="one"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    assert await left(client, caller)
    ends = [each for each in chunks(await collect(call)) if each.finish]
    assert [(each.finish, each.abandoned) for each in ends] == [(CANCELLED, abandoned)] * 2


async def test_who_leaves_ends_no_job_that_somebody_else_has_asked_for_since(
    worker: ScriptedWorker, client: Client, broker: Broker
) -> None:
    """Though it is the same payload under the same id, whichever gateway is told."""
    first = client.generate(request("r1", caller="one"))
    (claim,) = await worker.claim()
    async with running_gateway(broker) as (_, _, other):
        second = other.generate(request("r1", caller="one.two"))
        await second.initial_metadata()
        assert [await left(each, caller) for each in (client, other) for caller in ("one", "on", "two")] == [False] * 6
        await worker.answer(claim)
        assert tokens(await collect(second)) == tokens(await collect(first)) == [2, 3, 4]


async def test_a_job_goes_on_while_somebody_reads_it_who_has_not_left(worker: ScriptedWorker, broker: Broker) -> None:
    """Whoever asked for it first. Who only looks on does not count."""
    async with running_gateway(broker) as (gateway, _, client):
        first = client.generate(request("r1", caller="one"))
        (claim,) = await worker.claim()
        looks_on = client.attach(AttachRequest(request_id="r1", watch=True, caller="three"))
        goes_on = client.attach(AttachRequest(request_id="r1", caller="two"))
        await asyncio.gather(looks_on.initial_metadata(), goes_on.initial_metadata())
        assert [await left(client, caller) for caller in ("three", "two", "two")] == [False] * 3
        goes_on.cancel()

        async def has_gone() -> bool:
            return len(gateway._relay) == 2

        await until(has_gone, within_s=5)
        await worker.commit(chunk(claim, 0, [10]))
        for each in (first, looks_on):
            assert [[*one.token_ids] for one in (await each.read()).chunks] == [[10]]
        assert await left(client, "one")
        assert [(await collect(each))[-1].chunks[0].abandoned for each in (first, looks_on)] == [True] * 2


async def test_where_nobody_else_reads_a_job_its_last_caller_ends_it(
    worker: ScriptedWorker, client: Client, broker: Broker
) -> None:
    first = client.generate(request("r1", caller="one"))
    await worker.claim()
    async with running_gateway(broker) as (_, _, other):
        second = other.attach(AttachRequest(request_id="r1", caller="two"))
        await second.initial_metadata()
        assert [await left(other, caller) for caller in ("one", "two")] == [False, True]
        assert [(await collect(each))[-1].chunks[0].abandoned for each in (first, second)] == [True] * 2


async def test_no_callers_leaving_ends_a_detached_job(worker: ScriptedWorker, client: Client) -> None:
    """Not even that of one who goes on with it and does not know what it is."""
    call = client.generate(request("r1", caller="one", detached=True))
    (claim,) = await worker.claim()
    assert not await left(client, "one")
    again = client.attach(AttachRequest(request_id="r1", caller="two"))
    await again.initial_metadata()
    assert not await left(client, "two")
    await worker.commit(chunk(claim, 0, [10], finish=STOP))
    assert tokens(await collect(call)) == [10]


async def test_a_caller_has_a_plain_name_or_none(client: Client) -> None:
    limit = "must be empty, or 1 to 64 characters of [A-Za-z0-9._-]"
    for call in (
        client.generate(request("r1", caller="a:b")),
        client.attach(AttachRequest(request_id="r1", caller="a:b")),
        client.cancel(CancelRequest(request_id="r1", caller="a:b")),
    ):
        assert await failure(call) == (grpc.StatusCode.INVALID_ARGUMENT, f"caller is 'a:b': {limit}")


async def test_the_client_goes_on_with_what_was_ended_as_if_nobody_waited(
    worker: ScriptedWorker, broker: Broker
) -> None:
    """Its connection broke before it knew that the job was accepted; then no gateway was there for long."""
    async with running_gateway(broker) as (_, ready, raw):
        lost = raw.generate(request("r1"))
        await worker.claim()
        lost.cancel()
        assert await worker.told_to_drop() == "r1"
        worker.serve()
        async with product.Client([ready.grpc]) as client:
            responses = [each async for each in client.generate(request("r1"))]
    assert tokens(responses) == [2, 3, 4]
    assert {each.request_id for each in responses} == {"r1"}


async def test_the_client_ends_its_job_where_it_gives_up_and_no_other_one(
    worker: ScriptedWorker, broker: Broker
) -> None:
    """Two ask for the same. One gives up by its deadline, of which no gateway is to hear but by name."""
    async with running_gateway(broker) as (_, ready, _), product.Client([ready.grpc]) as client:
        waits = asyncio.create_task(anext(client.generate(request("r1"), timeout=2)))
        (claim,) = await worker.claim()
        caller = await broker.call("HGET", broker.keys.job("r1"), "caller")

        async def is_the_others() -> bool:
            return bool(await broker.call("HGET", broker.keys.job("r1"), "caller") != caller)

        stays = client.generate(request("r1"))
        first = asyncio.create_task(anext(stays))
        await until(is_the_others, within_s=10)
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
            await waits
        await worker.answer(claim)
        assert tokens([await first, *[each async for each in stays]]) == [2, 3, 4]
