"""What operators are told of workers, queues and decisions: the same by a gateway as by Redis."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc

from gateway.fleet import MAX_RETRIES
from octavo.v1 import fleet_pb2, inference_pb2, job_pb2
from ops import explain, ledger, show
from tests.integration.gateway.harness import collect, failure, request, running_gateway, tokens
from tests.integration.gateway.scripted import ScriptedWorker, chunk

if TYPE_CHECKING:
    from gateway.server import Gateway
    from kvstore.client import Broker


async def test_operators_get_the_same_from_a_gateway_and_from_redis(broker: Broker) -> None:
    url, namespace = broker.config.url, broker.config.namespace
    worker = ScriptedWorker(broker, prefill_tok_s=100.0, step_ms=8.0, sequence_ms=0.5, fetch_tok_s=900.0, index="exact")
    await worker.start()
    async with running_gateway(broker) as (_, ready, client):
        call = client.generate(request("r1"))
        await call.initial_metadata()
        (told,), (read,) = await show.workers_from_gateway(ready.grpc), await show.workers_from_redis(url, namespace)
        assert ageless(told) == ageless(read)
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


def ageless(worker: show.Row) -> show.Row:
    """Without what moves from one heartbeat to the next."""
    return {**worker, "heartbeat_age_ms": 0, "heartbeat_unix_ms": 0}


async def test_what_nobody_knows_is_not_explained(broker: Broker) -> None:
    async with running_gateway(broker) as (_, _, client):
        unknown = client.explain(fleet_pb2.ExplainRequest(request_id="r0"))
        assert await failure(unknown) == (
            grpc.StatusCode.NOT_FOUND,
            "job 'r0' is unknown, or ended too long ago",
        )
        code, message = await failure(client.explain(fleet_pb2.ExplainRequest(request_id="no id")))
        assert (code, message[:10]) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")


async def dying(broker: Broker, request_id: str) -> job_pb2.DeadJob:
    """A dead job, as a gateway that gave it up would have put it there."""
    job = job_pb2.Job(
        request_id=request_id,
        model="tiny",
        prompt_token_ids=[5, 6, 7],
        stopping=inference_pb2.Stopping(max_tokens=9),
        n=1,
    )
    dead = job_pb2.DeadJob(job=job, reason="3 workers died while they ran it", attempts=3, worker="w7")
    await broker.call("HSET", broker.keys.dead, job.request_id, dead.SerializeToString())
    await broker.call("ZADD", broker.keys.dead_times, time.time(), job.request_id)
    return dead


async def test_dead_jobs_are_listed_run_again_and_forgotten(broker: Broker) -> None:
    worker = ScriptedWorker(broker)
    await worker.start()
    for request_id in ("r1", "r2", "r3"):
        await dying(broker, request_id)
    async with running_gateway(broker) as (_, _, client):
        told = (await client.list_dead(fleet_pb2.ListDeadRequest())).jobs
        assert [(each.request_id, each.prompt_tokens, each.payload) for each in told] == [
            ("r3", 3, ""),
            ("r2", 3, ""),
            ("r1", 3, ""),
        ]
        assert not any(each.prompt_token_ids for each in told)
        (one,) = (await client.list_dead(fleet_pb2.ListDeadRequest(request_id="r2"))).jobs
        assert (one.reason, one.worker, one.attempts, list(one.prompt_token_ids)) == (
            *("3 workers died while they ran it", "w7", 3),
            [5, 6, 7],
        )
        unknown = (grpc.StatusCode.NOT_FOUND, "there is no dead job 'r9'")
        assert await failure(client.retry_dead(fleet_pb2.RetryDeadRequest(request_id="r9"))) == unknown
        for call, asked in (
            (client.retry_dead, fleet_pb2.RetryDeadRequest),
            (client.list_dead, fleet_pb2.ListDeadRequest),
            (client.drop_dead, fleet_pb2.DropDeadRequest),
        ):
            assert (await failure(call(asked(request_id="no id"))))[0] is grpc.StatusCode.INVALID_ARGUMENT
        dropped = [
            (await client.drop_dead(fleet_pb2.DropDeadRequest(request_id=each))).dropped
            for each in ("r2", "r2", "", "")
        ]
        assert dropped == [1, 0, 2, 0]
    await worker.stop()


async def retried(worker: ScriptedWorker) -> str:
    """Answers the next retry; its id."""
    (claim,) = await worker.claim()
    assert (claim.job.detached, claim.remaining_ms, list(claim.job.prompt_token_ids)) == (True, None, [5, 6, 7])
    await worker.answer(claim)
    return claim.job.request_id


def pipelines(gateway: Gateway) -> float:
    """How many a gateway has had answered by the broker."""
    return gateway.metrics.registry.get_sample_value("octavo_broker_seconds_count", {"call": "pipeline"}) or 0.0


async def test_a_dead_job_is_run_again_once_at_a_time(broker: Broker) -> None:
    """It is found out in one round trip which of its retries there are."""
    worker = ScriptedWorker(broker)
    await worker.start()
    await dying(broker, "r2")
    async with running_gateway(broker) as (gateway, _, client):

        async def retry() -> str:
            return str((await client.retry_dead(fleet_pb2.RetryDeadRequest(request_id="r2"))).request_id)

        first = "r2.retry-1"
        assert set(await asyncio.gather(retry(), retry())) == {first}
        assert await retry() == first
        assert await retried(worker) == first
        assert tokens(await collect(client.attach(inference_pb2.AttachRequest(request_id=first)))) == [2, 3, 4]
        assert await retry() == "r2.retry-2"
        # The second one lives while the first one is not kept any more.
        await broker.call("DEL", broker.keys.job(first))
        assert await retry() == "r2.retry-2"
        assert await retried(worker) == "r2.retry-2"
        before = pipelines(gateway)
        assert await retry() == first
        assert pipelines(gateway) - before < MAX_RETRIES
        # What has such an id by somebody else's choice is no retry.
        assert await retried(worker) == first
        calls = [client.generate(request(f"r2.retry-{number}")) for number in range(3, MAX_RETRIES + 1)]
        for call in calls:
            await call.initial_metadata()
        code, message = await failure(client.retry_dead(fleet_pb2.RetryDeadRequest(request_id="r2")))
        for call in calls:
            call.cancel()
        assert (code, message) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "'r2.retry-1' to 'r2.retry-16' are taken; try again later",
        )
        assert (await client.drop_dead(fleet_pb2.DropDeadRequest())).dropped == 1
    await worker.stop()


async def test_the_ledger_adds_up(broker: Broker) -> None:
    worker = ScriptedWorker(broker)
    await worker.start()
    async with running_gateway(broker) as (_, _, client):
        calls = []
        for index in range(5):
            calls.append(client.generate(request(f"r{index}")))
            await calls[-1].initial_metadata()  # accepted, and so claimed, in this order
        claims = {claim.job.request_id: claim for claim in await worker.claim(3)}
        assert set(claims) == {"r0", "r1", "r2"}
        await worker.answer(claims["r0"])
        await worker.commit(
            chunk(claims["r1"], 0, [], finish=inference_pb2.ERROR, failure=job_pb2.FAILURE_INTERNAL, error="x")
        )
        await client.cancel(inference_pb2.CancelRequest(request_id="r2"))
        await worker.jobs.finish(
            "r3", finish=inference_pb2.ERROR, failure=job_pb2.FAILURE_DEADLINE, error="the client's deadline passed"
        )
        await collect(calls[0])
        told = await ledger.from_redis(broker.config.url, broker.config.namespace)
        assert await client.ledger(fleet_pb2.LedgerRequest()) == told
        assert told == fleet_pb2.LedgerResponse(accepted=5, finished=1, failed=1, cancelled=1, expired=1, in_flight=1)
    await worker.stop()
