"""Jobs whose worker dies, leaves or drains: they go on at another one, and their callers see no difference."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.jobs import Commit, Jobs
from kvstore.registry import Load
from octavo.v1 import fleet_pb2, inference_pb2
from tests.integration.gateway.harness import Client, answers, collect, failed_stream, failure, request, running_gateway
from tests.integration.gateway.scripted import ScriptedWorker, chunk, tiny_card
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.server import Gateway
    from kvstore.client import Broker
    from kvstore.jobs import Claim

Code = grpc.StatusCode


@asynccontextmanager
async def pair(broker: Broker, **info: object) -> AsyncIterator[tuple[ScriptedWorker, ScriptedWorker]]:
    """A worker that is to get all jobs first, and another one."""
    first, other = ScriptedWorker(broker, "w0"), ScriptedWorker(broker, "w1", **info)
    await first.start()
    try:
        yield first, other
    finally:
        for each in (first, other):
            await each.stop()


async def loads(worker: ScriptedWorker) -> Load:
    return (await worker.registry.loads([worker.info]))[worker.info.id]


def shown(gateway: Gateway, outcome: str) -> float | None:
    return gateway.metrics.registry.get_sample_value("octavo_rehomed_total", {"outcome": outcome})


async def test_the_streams_of_a_dead_worker_go_on_elsewhere_and_its_neighbours_as_before(broker: Broker) -> None:
    """8 streams, of which half have output; what the dead one writes later is refused."""
    async with pair(broker) as (doomed, heir), running_gateway(broker) as (gateway, _, client):
        calls = [client.generate(request(f"r{index}")) for index in range(8)]
        started = await doomed.claim(4)
        await doomed.commit(*(chunk(claim, 0, [10]) for claim in started))
        await heir.start()
        await client.get_model(inference_pb2.GetModelRequest())  # the gateway knows the other one from here on
        kept = client.generate(request("kept"))
        (neighbour,) = await heir.claim()
        await doomed.die()
        claims = {claim.job.request_id: claim for claim in await heir.claim(8)}
        began = {claim.job.request_id for claim in started}
        assert {request_id: claim.attempt for request_id, claim in claims.items()} == {
            f"r{index}": 2 if f"r{index}" in began else 1 for index in range(8)
        }
        assert {claim.next for claim in claims.values() if claim.job.request_id in began} == {(1,)}
        assert await doomed.commit(chunk(started[0], 1, [99])) == [Commit.FENCED]
        for request_id, claim in claims.items():
            await rest(heir, claim, 1 if request_id in began else 0)
        for index, call in enumerate(calls):
            responses = await collect(call)
            assert answers(responses, 1) == [[10, 11, 12]]
            assert responses[-1].usage.attempts == (2 if f"r{index}" in began else 1)
        await heir.answer(neighbour)
        assert answers(await collect(kept), 1) == [[2, 3, 4]]
        assert shown(gateway, "moved") == 8
        assert shown(gateway, "dead") == shown(gateway, "ended") == 0
        assert (await loads(heir)) == Load()


async def rest(worker: ScriptedWorker, claim: Claim, start: int) -> None:
    """The rest of an answer of three tokens."""
    for index in range(start, 3):
        await worker.commit(chunk(claim, index, [10 + index], finish=inference_pb2.STOP if index == 2 else 0))


async def test_two_gateways_move_each_job_once(broker: Broker) -> None:
    async with (
        pair(broker) as (doomed, heir),
        running_gateway(broker) as (one, _, client),
        running_gateway(broker) as (two, _, _),
    ):
        calls = [client.generate(request(f"r{index}")) for index in range(20)]
        await doomed.claim(20)
        await heir.start()
        await doomed.die()
        heir.serve()
        for call in calls:
            assert answers(await asyncio.wait_for(collect(call), 10), 1) == [[2, 3, 4]]
        assert (shown(one, "moved") or 0) + (shown(two, "moved") or 0) == 20


async def test_a_worker_of_the_same_fingerprint_is_preferred(broker: Broker) -> None:
    strange = ScriptedWorker(broker, "w2", card=tiny_card("e" * 16), prefill_tok_s=10000.0)
    async with pair(broker) as (doomed, heir), running_gateway(broker) as (_, _, client):
        call = client.generate(request("r1"))
        await doomed.claim()
        await strange.start()
        await heir.start()
        await doomed.die()
        (claim,) = await heir.claim()
        await heir.answer(claim)
        assert answers(await collect(call), 1) == [[2, 3, 4]]
        await strange.stop()


async def test_what_a_draining_worker_has_not_begun_goes_elsewhere_at_once(broker: Broker) -> None:
    """Whether it has read it or not; and it goes on with the rest."""
    async with pair(broker) as (leaving, heir), running_gateway(broker) as (gateway, _, client):
        calls = [client.generate(request(f"r{index}")) for index in range(4)]
        begun, read = await leaving.claim(2)
        await leaving.commit(chunk(begun, 0, [10]))
        await heir.start()
        await leaving.drain()
        others = await heir.claim(3)
        assert shown(gateway, "moved") == 3
        assert sorted(each.attempt for each in others) == [1, 1, 2]
        assert await leaving.commit(chunk(read, 0, [99])) == [Commit.FENCED]
        for each in others:
            await heir.answer(each)
        await rest(leaving, begun, 1)
        found = [answers(await collect(call), 1) for call in calls]
        assert sorted(found) == [[[2, 3, 4]]] * 3 + [[[10, 11, 12]]]


async def test_a_job_waits_for_a_worker_to_come(broker: Broker) -> None:
    async with pair(broker) as (doomed, heir), running_gateway(broker) as (gateway, _, client):
        call = client.generate(request("r1"))
        (claim,) = await doomed.claim()
        await doomed.commit(chunk(claim, 0, [10]))
        await doomed.die()

        async def nobody_is_there() -> bool:
            return not await doomed.registry.workers()

        await until(nobody_is_there, within_s=6)
        assert (await failure(client.generate(request())))[0] is Code.UNAVAILABLE
        assert shown(gateway, "moved") == shown(gateway, "ended") == 0
        await heir.start()
        (again,) = await heir.claim()
        assert (again.attempt, again.next) == (2, (1,))
        await rest(heir, again, 1)
        assert answers(await collect(call), 1) == [[10, 11, 12]]


async def test_a_job_that_workers_die_of_ends_with_the_third(broker: Broker) -> None:
    async with pair(broker) as (first, second), running_gateway(broker) as (gateway, _, client):
        third, last = ScriptedWorker(broker, "w2"), ScriptedWorker(broker, "w3")
        call = client.generate(request("poison"))
        for victim, next_ in ((first, second), (second, third), (third, last)):
            await victim.claim()
            await next_.start()
            await victim.die()
        responses, code, message = await asyncio.wait_for(failed_stream(call), 10)
        assert (code, message) == (Code.INTERNAL, "3 workers died while they ran it")
        assert [each.finish for each in responses[-1].chunks] == [inference_pb2.ERROR]
        assert shown(gateway, "dead") == 1
        (dead,) = (await client.list_dead(fleet_pb2.ListDeadRequest())).jobs
        assert (dead.request_id, dead.attempts, dead.reason) == ("poison", 3, message)
        told = await client.ledger(fleet_pb2.LedgerRequest())
        assert (told.accepted, told.dead, told.in_flight) == (1, 1, 0)
        for each in (third, last):
            await each.stop()


@pytest.mark.parametrize("cut", [False, True])
async def test_worker_and_gateway_may_die_together(broker: Broker, cut: bool) -> None:
    """The job is moved by another gateway, and its caller goes on there."""
    async with pair(broker) as (doomed, heir), running_gateway(broker) as (_, _, other):
        async with running_gateway(broker, dies=True) as (_, _, client):
            call = client.generate(request("r1"))
            (claim,) = await doomed.claim()
            await doomed.commit(chunk(claim, 0, [10]), chunk(claim, 1, [11]))
            await call.read()
            await heir.start()
            await doomed.die()
            if cut:
                (again,) = await heir.claim()
        if not cut:
            (again,) = await heir.claim()
        going_on = attach(other, "r1", 2)
        await going_on.initial_metadata()
        await heir.commit(chunk(again, 2, [12], finish=inference_pb2.STOP))
        assert answers(await collect(going_on), 1, {0: 2}) == [[12]]


def attach(client: Client, request_id: str, *after: int) -> grpc.aio.UnaryStreamCall[object, object]:
    call: grpc.aio.UnaryStreamCall[object, object] = client.attach(
        inference_pb2.AttachRequest(request_id=request_id, after=dict(enumerate(after)))
    )
    return call


async def test_choices_go_on_each_from_where_it_was(broker: Broker) -> None:
    async with pair(broker) as (leaving, heir), running_gateway(broker) as (_, _, client):
        call = client.generate(request("r1", n=3))
        (claim,) = await leaving.claim()
        end = chunk(claim, 0, [20], choice=1, finish=inference_pb2.STOP, used=2)
        await leaving.commit(chunk(claim, 0, [10]), end)
        await heir.start()
        await leaving.stop()
        (again,) = await heir.claim()
        assert (again.attempt, again.next, again.ended) == (2, (1, 1, 0), {1})
        await heir.commit(
            chunk(again, 0, [30], choice=2, finish=inference_pb2.STOP, used=3),
            chunk(again, 1, [11], finish=inference_pb2.LENGTH, used=4),
        )
        responses = await collect(call)
        assert answers(responses, 3) == [[10, 11], [20], [30]]
        assert (responses[-1].usage.completion_tokens, responses[-1].usage.attempts) == (4, 2)


async def test_a_job_does_not_wait_for_ever(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice that is open ends once, and the caller is told to try again."""
    monkeypatch.setitem(Jobs.__init__.__kwdefaults__, "orphan_wait_s", 0.5)  # only the waiting is shorter
    async with pair(broker) as (leaving, _), running_gateway(broker) as (gateway, _, client):
        call = client.generate(request("r1", n=2))
        (claim,) = await leaving.claim()
        await leaving.commit(chunk(claim, 0, [10]))
        await leaving.stop()
        responses, code, message = await asyncio.wait_for(failed_stream(call), 5)
        assert code is Code.UNAVAILABLE
        assert message == "worker w0 left, and for 0.5 s there was no other to run it"
        assert dict(await call.trailing_metadata())["retry-after-ms"] == "1000"
        assert answers(responses, 2) == [[10], []]
        assert shown(gateway, "ended") == 1
