"""Fleets whose workers differ: in device, in name, in tokenizer, in age."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from gateway.errors import STARTING
from kvstore.errors import RequestIdTaken
from kvstore.registry import DRAINING, Registry
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import Chat, ChatMessage, GetModelRequest
from tests.integration.gateway.harness import collect, failure, fleet, request, running_gateway, tokens
from tests.integration.gateway.scripted import TEMPLATE, ScriptedWorker, chunk, tiny_card
from tests.support.waiting import until

if TYPE_CHECKING:
    import pytest

    from kvstore.client import Broker


async def test_workers_of_several_fingerprints_share_one_models_requests(broker: Broker) -> None:
    """As when some have a GPU. The limits are those that hold on all of them."""
    workers = [
        ScriptedWorker(broker, "w0", card=tiny_card("c" * 16), context_length=2048, vocab_size=290),
        ScriptedWorker(broker, "w1", card=tiny_card("d" * 16)),
        ScriptedWorker(broker, "w2", card=tiny_card("d" * 16)),
    ]
    async with fleet(broker, *workers) as client:
        model = await client.get_model(GetModelRequest(name="tiny"))
        assert (model.workers, model.fingerprint, model.context_length, model.vocab_size) == (3, "d" * 16, 2048, 290)
        calls = [client.generate(request(f"r{index}")) for index in range(30)]
        for call in calls:
            await call.initial_metadata()
        queues = {queue.worker: queue.undelivered for queue in await workers[0].jobs.queues()}
        assert sum(queues.values()) == 30
        assert min(queues.values()) >= 5
        for worker in workers:
            worker.serve()
        for responses in await asyncio.gather(*map(collect, calls)):
            assert tokens(responses) == [2, 3, 4]


async def test_one_fingerprint_under_two_names(broker: Broker) -> None:
    workers = [ScriptedWorker(broker, "w0", model="large"), ScriptedWorker(broker, "w1", model="small")]
    async with fleet(broker, *workers) as client:
        for worker in workers:
            name = worker.info.model
            assert (await client.get_model(GetModelRequest(name=name))).name == name
            call = client.generate(request(model=name))
            (claim,) = await worker.claim()
            assert claim.job.model == name
            await worker.answer(claim)
            await collect(call)


async def test_a_card_that_nobody_has_yet_is_replaced_by_a_neighbours(broker: Broker) -> None:
    """Either card will do, as both have the tokenizer."""
    unpublished = ScriptedWorker(broker, "w0", card=tiny_card("a" * 16))
    published = ScriptedWorker(broker, "w1", card=tiny_card("b" * 16))
    await Registry(broker).register(unpublished.info)
    async with fleet(broker, published) as client:
        assert (await client.get_model(GetModelRequest())).workers == 2


async def test_workers_of_two_tokenizers_do_not_share_and_a_warning_says_so(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    old = tiny_card("a" * 16, template="old" + TEMPLATE)
    workers = [
        ScriptedWorker(broker, "w0", card=old),
        ScriptedWorker(broker, "w1", card=tiny_card("b" * 16)),
        ScriptedWorker(broker, "w2", card=tiny_card("c" * 16)),
    ]
    with caplog.at_level(logging.WARNING, logger="gateway.models"):
        async with fleet(broker, *workers) as client:
            assert (await client.get_model(GetModelRequest())).workers == 2
            calls = [client.generate(request(chat=Chat(messages=[ChatMessage(role="user")]))) for _ in range(8)]
            for call in calls:
                await call.initial_metadata()
            queues = {queue.worker: queue.undelivered for queue in await workers[0].jobs.queues()}
            assert (queues.get("w0", 0), sum(queues.values())) == (0, 8)

            async def warned() -> bool:
                return bool(caplog.records)

            await until(warned, within_s=3)
            await asyncio.sleep(1.2)  # the next look at the fleet says nothing again
    assert [record.getMessage() for record in caplog.records if record.name == "gateway.models"] == [
        "the workers of model 'tiny' have several tokenizers: only those of one get jobs"
    ]


async def test_a_job_is_read_to_its_end_from_a_worker_that_drains(broker: Broker) -> None:
    """By a gateway that has never seen that worker ready."""
    worker = ScriptedWorker(broker)
    async with fleet(broker, worker) as client:
        first = client.generate(request("r1", model="tiny"))
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [10]))
        await first.read()
        worker.info = replace(worker.info, state=DRAINING)
        assert (await worker.registry.renew(worker.info)).held_lease
        async with running_gateway(broker) as (_, _, other):
            again = other.generate(request("r1", model="tiny"))
            await again.initial_metadata()
            await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
            assert tokens(await collect(again)) == [10, 11]
            taken = (grpc.StatusCode.ALREADY_EXISTS, str(RequestIdTaken("r1")))
            assert await failure(other.generate(request("r1", model="tiny", prompt=[9]))) == taken
            draining = (grpc.StatusCode.UNAVAILABLE, f"all live workers of model 'tiny' are draining; {STARTING}")
            assert await failure(other.generate(request("r2", model="tiny"))) == draining


async def test_a_job_is_read_to_its_end_when_no_worker_is_left(broker: Broker) -> None:
    worker = ScriptedWorker(broker)
    async with fleet(broker, worker) as client:
        first = client.generate(request("r1"))
        (claim,) = await worker.claim()
        await worker.answer(claim)
        assert tokens(await collect(first)) == [2, 3, 4]
        await worker.stop()
        again = await collect(client.generate(request("r1")))
        assert tokens(again) == [2, 3, 4]
        assert (again[0].route.worker, again[-1].usage.completion_tokens) == ("w0", 3)
        nobody = (grpc.StatusCode.UNAVAILABLE, f"no live worker of model 'tiny' takes jobs; {STARTING}")
        assert await failure(client.generate(request("r2"))) == nobody


async def test_a_caller_who_attached_and_leaves_ends_the_job(broker: Broker) -> None:
    """As the one who submitted it would: nobody else waits for it."""
    worker = ScriptedWorker(broker)
    async with fleet(broker, worker):
        async with running_gateway(broker, grace_s=0) as (_, _, other):
            await other.generate(request("r1")).initial_metadata()
            await worker.claim()
        async with running_gateway(broker) as (_, _, client):
            again = client.generate(request("r1"))
            await again.initial_metadata()
            again.cancel()
            assert await worker.told_to_drop() == "r1"
