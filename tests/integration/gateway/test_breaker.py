"""A worker whose jobs fail gets no more of them, as long as another one takes jobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from octavo.v1 import fleet_pb2, inference_pb2, job_pb2
from tests.integration.gateway.harness import collect, failed_stream, lose, request, tokens
from tests.integration.gateway.scripted import ScriptedWorker, chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from gateway.server import Gateway
    from kvstore.client import Broker
    from tests.integration.gateway.harness import Client


async def fail(worker: ScriptedWorker, client: Client, why: int = job_pb2.FAILURE_INTERNAL) -> None:
    call = client.generate(request())
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [], finish=inference_pb2.ERROR, failure=why, error="broken"))
    assert (await failed_stream(call))[1:] == (grpc.StatusCode.INTERNAL, "broken")
    await until(nobody_is_blamed, within_s=3)


async def nobody_is_blamed() -> bool:
    """Whether all that the gateway has to learn of failures is learnt."""
    return not any(task.get_name().startswith("blame ") for task in asyncio.all_tasks())


async def open_circuits(gateway: Gateway, count: int) -> bool:
    return gateway.metrics.registry.get_sample_value("octavo_open_circuits") == count


async def answered(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request())
    (claim,) = await worker.claim()
    await worker.answer(claim)
    assert tokens(await collect(call)) == [2, 3, 4]


async def test_five_failures_in_a_row_keep_a_worker_from_jobs(
    worker: ScriptedWorker, gateway: Gateway, client: Client, broker: Broker
) -> None:
    shown = gateway.metrics.registry.get_sample_value
    for _ in range(4):
        await fail(worker, client)
    await answered(worker, client)
    for _ in range(4):
        await fail(worker, client)
    assert shown("octavo_open_circuits") == 0
    await fail(worker, client)
    assert shown("octavo_open_circuits") == 1
    (told,) = (await client.list_workers(fleet_pb2.ListWorkersRequest())).workers
    assert told.circuit == "open"
    # Alone it goes on getting them, and a success closes the circuit.
    await fail(worker, client)
    other = ScriptedWorker(broker, "w1")
    await other.start()
    await client.get_model(inference_pb2.GetModelRequest())  # the gateway knows it from here on
    for _ in range(4):
        await answered(other, client)
    assert shown("octavo_open_circuits") == 1
    await other.stop()
    await client.get_model(inference_pb2.GetModelRequest())
    await answered(worker, client)
    assert shown("octavo_open_circuits") == 0
    assert {each.circuit for each in (await client.list_workers(fleet_pb2.ListWorkersRequest())).workers} == {""}


async def test_what_failed_at_a_worker_that_is_gone_is_forgotten(
    worker: ScriptedWorker, gateway: Gateway, client: Client
) -> None:
    for _ in range(5):
        await fail(worker, client)
    assert await open_circuits(gateway, 1)
    await worker.stop()
    await until(lambda: open_circuits(gateway, 0), within_s=5)


async def test_a_lost_job_that_is_submitted_again_may_be_the_trial(
    worker: ScriptedWorker, gateway: Gateway, client: Client
) -> None:
    """It is over with its first token there, which its reader has already."""
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    await call.read()
    for _ in range(5):
        await fail(worker, client)
    assert await open_circuits(gateway, 1)
    await lose(worker, "r1")
    (again,) = await asyncio.wait_for(worker.claim(), 5)
    await worker.commit(chunk(again, 0, [10]))
    await until(lambda: open_circuits(gateway, 0), within_s=3)
    await worker.commit(chunk(again, 1, [11], finish=inference_pb2.STOP))
    (last,) = await collect(call)
    assert list(last.chunks[0].token_ids) == [11]
