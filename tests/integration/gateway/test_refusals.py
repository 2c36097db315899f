"""Calls that are refused: no worker, no room, a broker that is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage

from gateway.errors import STARTING
from octavo.v1.fleet_pb2 import GetQueuesRequest, ListWorkersRequest
from octavo.v1.inference_pb2 import GetModelRequest
from tests.integration.gateway.harness import (
    collect,
    failure,
    fleet,
    fleet_of_its_own,
    request,
    running_gateway,
    tokens,
)
from tests.integration.gateway.scripted import ScriptedWorker

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker
    from tests.integration.gateway.harness import Client

Code = grpc.StatusCode


async def test_no_worker_at_all(broker: Broker) -> None:
    async with running_gateway(broker) as (_, _, client):
        assert await failure(client.generate(request())) == (Code.UNAVAILABLE, f"no live worker; {STARTING}")
        expected = (Code.UNAVAILABLE, f"no live worker serves model 'tiny'; {STARTING}")
        assert await failure(client.generate(request(model="tiny"))) == expected


async def test_a_draining_worker_gets_no_jobs(broker: Broker) -> None:
    async with fleet(broker, ScriptedWorker(broker, state="draining")) as client:
        expected = (Code.UNAVAILABLE, f"all live workers of model 'tiny' are draining; {STARTING}")
        assert await failure(client.generate(request())) == expected


async def test_full_queues_are_refused_with_a_hint_when_to_come_back(worker: ScriptedWorker, broker: Broker) -> None:
    async with running_gateway(broker, max_queue=2) as (_, _, client):
        calls = [client.generate(request(f"r{index}")) for index in range(2)]
        for call in calls:
            await call.initial_metadata()
        refused = client.generate(request("r2"))
        expected = (Code.RESOURCE_EXHAUSTED, "all queues of model 'tiny' are full (2 jobs each); try again later")
        assert await failure(refused) == expected
        # Nothing waits there but for the end of what runs, so soon.
        told = dict(await refused.trailing_metadata())
        assert (told["retry-after-ms"], told["grpc-retry-pushback-ms"]) == ("100", "100")
        details = told["grpc-status-details-bin"]
        assert (
            AnyMessage(
                type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\x0a\x05\x10\x80\xc2\xd7\x2f"
            ).SerializeToString()
            in details
        )
        # The same id and payload still attaches: that takes no room.
        again = client.generate(request("r1"))
        await again.initial_metadata()
        for claim in await worker.claim(2):
            await worker.answer(claim)
        for call in (*calls, again):
            assert tokens(await collect(call)) == [2, 3, 4]


async def test_a_key_of_another_type_is_named(worker: ScriptedWorker, client: Client, broker: Broker) -> None:
    await client.get_model(GetModelRequest())
    keys = broker.keys
    # Who the workers are is known for a while, so that a request would still find one.
    for key, call in (
        (keys.jobs("w0"), lambda: client.generate(request())),
        (keys.workers, lambda: client.list_workers(ListWorkersRequest())),
        (keys.workers, lambda: client.get_queues(GetQueuesRequest())),
    ):
        await broker.call("DEL", key)
        await broker.call("SET", key, "junk")
        expected = f"in the broker key {key} is of another type than is written there; whoever runs this must delete it"
        assert await failure(call()) == (Code.UNAVAILABLE, expected)
        await broker.call("DEL", key)
        await worker.registry.renew(worker.info)


async def test_more_streams_than_the_gateway_takes(worker: ScriptedWorker, broker: Broker) -> None:
    async with running_gateway(broker, max_streams=1) as (_, _, client):
        first = client.generate(request("r1"))
        await first.initial_metadata()
        code, message = await failure(client.generate(request("r2")))
        assert (code, message) == (
            Code.RESOURCE_EXHAUSTED,
            "this gateway has 1 open streams, its limit; try again later",
        )
        (claim,) = await worker.claim()
        await worker.answer(claim)
        await collect(first)
        second = client.generate(request("r2"))
        (claim,) = await worker.claim()
        await worker.answer(claim)
        assert tokens(await collect(second)) == [2, 3, 4]


async def test_a_full_broker_refuses_new_work_and_running_work_ends_well(broker_binary: Path) -> None:
    async with fleet_of_its_own(broker_binary) as (_, worker, client):
        call = client.generate(request("r1"))
        (claim,) = await worker.claim()
        await worker.broker.call("CONFIG", "SET", "maxmemory", "1mb")
        full = (Code.RESOURCE_EXHAUSTED, "the broker's memory is full; try again later")
        assert await failure(client.generate(request("r2"))) == full
        await worker.answer(claim)
        assert tokens(await collect(call)) == [2, 3, 4]
        await worker.broker.call("CONFIG", "SET", "maxmemory", "0")
        call = client.generate(request("r2"))
        (claim,) = await worker.claim()
        await worker.answer(claim)
        assert tokens(await collect(call)) == [2, 3, 4]
