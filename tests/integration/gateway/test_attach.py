"""Going on with a job at any gateway, from wherever its caller is; and jobs that nobody waits for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.jobs import Commit, JobState
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import CANCELLED, STOP, AttachRequest
from tests.integration.gateway.harness import (
    Client,
    answers,
    chunks,
    collect,
    failed_stream,
    failure,
    request,
    running_gateway,
    tokens,
)
from tests.integration.gateway.scripted import ScriptedWorker, chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from gateway.server import Gateway
    from kvstore.client import Broker

Code = grpc.StatusCode


def attach(client: Client, request_id: str = "r1", after: dict[int, int] | None = None) -> Any:
    return client.attach(AttachRequest(request_id=request_id, after=after or {}))


async def finish_of(worker: ScriptedWorker, request_id: str) -> int | None:
    """How a job ended; None while it has not."""
    record = await worker.jobs.get(request_id)
    assert record is not None
    return record.finish if record.state is JobState.ENDED else None


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("ended", [False, True])
async def test_a_caller_goes_on_at_another_gateway(
    worker: ScriptedWorker, client: Client, broker: Broker, after: int, ended: bool
) -> None:
    first = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(*(chunk(claim, index, [10 + index]) for index in range(3)))
    last = chunk(claim, 3, [13], finish=STOP)
    if ended:
        await worker.commit(last)
    async with running_gateway(broker) as (_, _, other):
        second = attach(other, after={0: after} if after else {})
        assert dict(await second.initial_metadata())["octavo-request-id"] == "r1"
        if not ended:
            await worker.commit(last)
        responses = await asyncio.wait_for(collect(second), 5)
        assert answers(responses, 1, {0: after}) == [[10, 11, 12, 13][after:]]
        # The route comes with the first output of all.
        assert responses[0].HasField("route") is (after == 0)
        assert responses[-1].usage.completion_tokens == 4
    assert tokens(await collect(first)) == [10, 11, 12, 13]


async def test_choices_go_on_each_from_its_own_token_and_ends_are_told_again(
    worker: ScriptedWorker, client: Client
) -> None:
    call = client.generate(request("r1", n=3))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10, 11]), chunk(claim, 0, [20], choice=1))
    await worker.commit(chunk(claim, 0, [30], choice=2), chunk(claim, 1, [21], choice=1, finish=STOP, used=5))
    after = {0: 1, 1: 2}
    second = attach(client, after=after)
    await second.initial_metadata()
    await worker.commit(
        chunk(claim, 2, [12], finish=STOP, used=6), chunk(claim, 1, [31], choice=2, finish=STOP, used=7)
    )
    responses = await asyncio.wait_for(collect(second), 5)
    assert answers(responses, 3, after) == [[11, 12], [], [30, 31]]
    (end,) = (each for each in chunks(responses) if each.choice == 1)
    assert (end.start, end.finish, end.text) == (2, STOP, "")
    assert responses[-1].usage.completion_tokens == 7
    assert answers(await collect(call), 3) == [[10, 11, 12], [20, 21], [30, 31]]


async def test_who_has_all_of_an_ended_job_gets_its_end(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.answer(claim)
    assert tokens(await collect(call)) == [2, 3, 4]
    (response,) = await collect(attach(client, after={0: 3}))
    (end,) = response.chunks
    assert (end.start, list(end.token_ids), end.finish, response.usage.completion_tokens) == (3, [], STOP, 3)


async def test_who_has_more_than_the_broker_waits_until_the_job_is_there_again(
    worker: ScriptedWorker, client: Client
) -> None:
    """As after a restart of the broker that lost its last second."""
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    second = attach(client, after={0: 2})
    await second.initial_metadata()
    await worker.commit(chunk(claim, 1, [11]), chunk(claim, 2, [12]))
    assert [each.start for each in (await asyncio.wait_for(second.read(), 3)).chunks] == [2]
    await worker.commit(chunk(claim, 3, [13], finish=STOP))
    assert tokens(await collect(call)) == [10, 11, 12, 13]
    (last,) = await collect(second)
    assert list(last.chunks[0].token_ids) == [13]


async def test_a_cancelled_job_ends_behind_what_its_reader_has(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    await worker.jobs.cancel("r1")
    for after, expected in ((0, [(0, 0), (1, CANCELLED)]), (1, [(1, CANCELLED)]), (5, [(5, CANCELLED)])):
        responses = await asyncio.wait_for(collect(attach(client, after={0: after})), 3)
        assert [(each.start, each.finish) for each in chunks(responses)] == expected
    assert [each.finish for each in chunks(await collect(call))][-1] == CANCELLED


async def test_what_can_not_be_gone_on_with(worker: ScriptedWorker, client: Client) -> None:
    assert await failure(attach(client, "r9")) == (Code.NOT_FOUND, "job 'r9' is unknown, or ended too long ago")
    assert (await failure(attach(client, "no id")))[0] is Code.INVALID_ARGUMENT
    call = client.generate(request("r1", n=2))
    await call.initial_metadata()
    expected = (Code.INVALID_ARGUMENT, "after is of choice 2: the job has 2, counted from 0")
    assert await failure(attach(client, after={2: 1})) == expected
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [1], finish=STOP), chunk(claim, 0, [2], choice=1, finish=STOP, used=2))
    assert answers(await collect(call), 2) == [[1], [2]]


async def test_a_caller_who_leaves_ends_the_job_that_it_went_on_with(
    worker: ScriptedWorker, client: Client, broker: Broker
) -> None:
    first = client.generate(request("r1"))
    await worker.claim()
    async with running_gateway(broker) as (_, _, other):
        second = attach(other)
        await second.initial_metadata()
        second.cancel()
        assert await worker.told_to_drop() == "r1"
        (last,) = await collect(first)
        assert last.chunks[0].finish == CANCELLED


async def test_a_deadline_ends_a_job_that_was_gone_on_with(
    worker: ScriptedWorker, client: Client, broker: Broker
) -> None:
    first = client.generate(request("r1"))
    await worker.claim()
    async with running_gateway(broker) as (_, _, other):
        going_on = other.attach(AttachRequest(request_id="r1"), timeout=0.3)
        assert (await failure(going_on))[0] is Code.DEADLINE_EXCEEDED
        assert await worker.told_to_drop() == "r1"
        assert await finish_of(worker, "r1") == inference_pb2.ERROR
        assert (await failed_stream(first))[1] is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize("same", [True, False])
async def test_who_only_looks_on_ends_nothing_and_keeps_nothing_alive(
    worker: ScriptedWorker, gateway: Gateway, client: Client, broker: Broker, same: bool
) -> None:
    """Whether the owner of the job calls another gateway or the same one."""
    own = client.generate(request("r1", n=2))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    async with running_gateway(broker) as (looked_at, _, other):
        looked_at, other = (gateway, client) if same else (looked_at, other)
        leaves, stays = (other.attach(AttachRequest(request_id="r1", watch=True)) for _ in range(2))
        for each in (leaves, stays):
            read = await asyncio.wait_for(each.read(), 3)
            assert (read.choices, list(read.chunks[0].token_ids)) == (2, [10])
        leaves.cancel()
        await until(lambda: streams_are(looked_at, 2 if same else 1), within_s=3)
        assert await worker.commit(chunk(claim, 1, [11])) == [Commit.WRITTEN]
        read = await asyncio.wait_for(stays.read(), 3)
        assert (read.choices, list(read.chunks[0].token_ids)) == (0, [11])
        own.cancel()
        assert await asyncio.wait_for(worker.told_to_drop(), 3) == "r1"
        ends = chunks(await asyncio.wait_for(collect(stays), 3))
        assert [each.finish for each in ends] == [CANCELLED, CANCELLED]


async def streams_are(gateway: Gateway, count: int) -> bool:
    return gateway.metrics.registry.get_sample_value("octavo_streams") == count


@pytest.mark.parametrize("how", ["leaves", "deadline", "leaves again"])
async def test_nobodys_leaving_ends_a_detached_job(
    worker: ScriptedWorker, gateway: Gateway, client: Client, how: str
) -> None:
    call = client.generate(request("r1", detached=True), timeout=0.5 if how == "deadline" else None)
    (claim,) = await worker.claim()
    assert (claim.job.detached, claim.remaining_ms) == (True, None)
    if how == "deadline":
        assert (await failure(call))[0] is Code.DEADLINE_EXCEEDED
    else:
        call.cancel()
    if how == "leaves again":
        again = attach(client)
        await again.initial_metadata()
        again.cancel()
    await worker.commit(chunk(claim, 0, [10]))

    async def nobody_waits() -> bool:
        streams = gateway.metrics.registry.get_sample_value("octavo_streams")
        return not streams and not any(task.get_name().startswith("end ") for task in asyncio.all_tasks())

    await until(nobody_waits, within_s=3)
    assert await worker.commit(chunk(claim, 1, [11], finish=STOP)) == [Commit.WRITTEN]
    assert await finish_of(worker, "r1") == STOP
    assert worker.ended_outside.empty()
    assert answers(await collect(attach(client, after={0: 1})), 1, {0: 1}) == [[11]]
    # The same request gets all of it, and Cancel is another matter.
    assert tokens(await collect(client.generate(request("r1", detached=True)))) == [10, 11]


async def test_a_detached_job_can_be_cancelled(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1", detached=True))
    await worker.claim()
    assert (await client.cancel(inference_pb2.CancelRequest(request_id="r1"))).cancelled
    (last,) = await collect(call)
    assert last.chunks[0].finish == CANCELLED
