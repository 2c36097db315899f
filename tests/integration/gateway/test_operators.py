"""What operators are told of workers, queues and decisions: the same by a gateway as by Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from octavo.v1 import fleet_pb2
from ops import explain, show
from tests.integration.gateway.harness import collect, failure, request, running_gateway
from tests.integration.gateway.scripted import ScriptedWorker

if TYPE_CHECKING:
    from kvstore.client import Broker


async def test_operators_get_the_same_from_a_gateway_and_from_redis(broker: Broker) -> None:
    url, namespace = broker.config.url, broker.config.namespace
    worker = ScriptedWorker(broker, prefill_tok_s=100.0, step_ms=8.0, sequence_ms=0.5, fetch_tok_s=900.0, index="exact")
    await worker.start()
    async with running_gateway(broker) as (_, ready, client):
        call = client.generate(request("r1"))
        await call.initial_metadata()
        (told,), (read,) = await show.workers_from_gateway(ready.grpc), await show.workers_from_redis(url, namespace)
        assert {**told, "heartbeat_age_ms": 0} == {**read, "heartbeat_age_ms": 0}
        rates = {"prefill_tokens_per_s": 100.0, "step_ms": 8.0, "sequence_ms": 0.5, "fetch_tokens_per_s": 900.0}
        assert rates.items() <= told.items()
        (told,), (read,) = await show.queues_from_gateway(ready.grpc), await show.queues_from_redis(url, namespace)
        assert list(told) == list(read)
        assert (told["undelivered"], read["undelivered"]) == (1, 1)
        found = await explain.from_gateway(ready.grpc, "r1")
        assert found == await explain.from_redis(url, namespace, "r1")
        assert found.route.request_id == "r1"
        assert await explain.from_redis(url, namespace, "r2") is None
        (claim,) = await worker.claim()
        await worker.answer(claim)
        await collect(call)
    await worker.stop()


async def test_what_nobody_knows_is_not_explained(broker: Broker) -> None:
    async with running_gateway(broker) as (_, _, client):
        unknown = client.explain(fleet_pb2.ExplainRequest(request_id="r0"))
        assert await failure(unknown) == (
            grpc.StatusCode.NOT_FOUND,
            "job 'r0' is unknown, or ended too long ago",
        )
        code, message = await failure(client.explain(fleet_pb2.ExplainRequest(request_id="no id")))
        assert (code, message[:10]) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")
