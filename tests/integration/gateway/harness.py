"""Gateways in this process on a real broker, a client of them, and what a client may expect."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio

from gateway.access import OPEN, Access, keyed, open_channel
from gateway.config import GatewayConfig
from gateway.server import Gateway
from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from octavo.v1 import fleet_pb2_grpc, inference_pb2_grpc
from octavo.v1.inference_pb2 import Chunk, GenerateRequest, GenerateResponse, Sampling, Stopping, TokenIds
from tests.integration.gateway.scripted import ScriptedWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from pathlib import Path

    from gateway.server import Ready
    from kvstore.client import Broker
    from kvstore.jobs import Claim


class Client:
    """Typed calls to one gateway."""

    def __init__(self, target: str, access: Access = OPEN) -> None:
        self.channel = open_channel(target, access, [("grpc.enable_http_proxy", 0)])
        channel = keyed(self.channel, access)
        inference: Any = inference_pb2_grpc.InferenceStub(channel)
        fleet: Any = fleet_pb2_grpc.FleetStub(channel)
        self.generate = inference.Generate
        self.attach = inference.Attach
        self.cancel = inference.Cancel
        self.get_model = inference.GetModel
        self.list_workers = fleet.ListWorkers
        self.get_queues = fleet.GetQueues
        self.explain = fleet.Explain
        self.ledger = fleet.Ledger
        self.list_dead = fleet.ListDead
        self.retry_dead = fleet.RetryDead
        self.drop_dead = fleet.DropDead


def request(
    request_id: str = "", *, prompt: Sequence[int] = (5, 6, 7), max_tokens: int = 16, **fields: Any
) -> GenerateRequest:
    """A plain request."""
    return GenerateRequest(
        request_id=request_id,
        **({} if {"text", "chat"} & set(fields) else {"token_ids": TokenIds(ids=prompt)}),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=max_tokens),
        **fields,
    )


async def collect(call: Any) -> list[GenerateResponse]:
    """All responses of a call that are left. Raises AioRpcError when it ends with another status than OK."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and message of a call, unary or streaming, that fails before it has written anything."""
    try:
        got = await (collect(call) if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"the call succeeded: {got}")


async def ring_elsewhere(worker: ScriptedWorker, claim: Claim, gateway: str) -> None:
    """From now on the doorbell rings for another gateway, so what is committed is only in the log."""
    await worker.broker.call("HSET", worker.broker.keys.job(claim.job.request_id), "gateway", gateway)


async def lose(worker: ScriptedWorker, request_id: str) -> None:
    """The broker forgets a job and its output; its entry and its charge too, as if it had never come."""
    keys, record = worker.broker.keys, await worker.jobs.get(request_id)
    assert record is not None
    await worker.broker.call(
        "DEL",
        *(keys.job(request_id), keys.log(request_id), keys.jobs(record.worker)),
        keys.load(record.worker, record.worker_incarnation),
    )


async def failed_stream(call: Any) -> tuple[list[GenerateResponse], grpc.StatusCode, str]:
    """All responses of a call that fails, and how."""
    responses = []
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
    except grpc.aio.AioRpcError as error:
        return responses, error.code(), error.details() or ""
    raise AssertionError(f"the call succeeded: {responses}")


def chunks(responses: Iterable[GenerateResponse]) -> list[Chunk]:
    """All chunks, in order."""
    return [each for response in responses for each in response.chunks]


def answers(responses: Sequence[GenerateResponse], n: int, after: Mapping[int, int] | None = None) -> list[list[int]]:
    """Token ids of each of n choices: whole answers, as the service promises them; what comes `after` the tokens that
    the caller had.

    Indexes are contiguous, from 0 or from `after`, each choice has one terminal chunk, its last; the route comes with
    the first response, if one comes at all, and the usage with the last one alone.
    """
    ids: list[list[int]] = [[] for _ in range(n)]
    ended: set[int] = set()
    for each in chunks(responses):
        assert each.choice not in ended
        assert each.start == (after or {}).get(each.choice, 0) + len(ids[each.choice])
        ids[each.choice] += each.token_ids
        if each.finish:
            ended.add(each.choice)
    assert ended == set(range(n))
    assert not any(response.HasField("route") for response in responses[1:])
    assert [response.HasField("usage") for response in responses] == [False] * (len(responses) - 1) + [True]
    return ids


def tokens(responses: Sequence[GenerateResponse]) -> list[int]:
    """``answers`` of one choice."""
    (ids,) = answers(responses, 1)
    return ids


@asynccontextmanager
async def running_gateway(
    broker: Broker, *, dies: bool = False, **settings: Any
) -> AsyncIterator[tuple[Gateway, Ready, Client]]:
    """A gateway in this process, and a client of it. `dies`: at the end it goes first, so that what its client had open
    has not been left by anybody; else the client leaves."""
    config = broker.config
    fixed = {"grpc_port": 0, "grace_s": 0.2}
    gateway = Gateway(GatewayConfig(config.url, config.namespace, **{**fixed, **settings}))
    ready = await gateway.start()
    client = Client(ready.grpc)
    hurry = asyncio.Event()
    hurry.set()
    try:
        yield gateway, ready, client
    finally:
        if dies:
            await gateway.stop(hurry)
        await client.channel.close()
        if not dies:
            await gateway.stop(hurry)


@asynccontextmanager
async def fleet(broker: Broker, *workers: ScriptedWorker, **settings: Any) -> AsyncIterator[Client]:
    """Started workers, and a client of a gateway that has just come."""
    for worker in workers:
        await worker.start()
    try:
        async with running_gateway(broker, **settings) as (_, _, client):
            yield client
    finally:
        for worker in workers:
            await worker.stop()


@asynccontextmanager
async def fleet_of_its_own(binary: Path) -> AsyncIterator[tuple[EmbeddedBroker, ScriptedWorker, Client]]:
    """A fleet with one worker, on a server that the test may break."""
    async with EmbeddedBroker(binary=binary) as server:
        broker = await connect(BrokerConfig(server.url))
        worker = ScriptedWorker(broker)
        try:
            async with fleet(broker, worker) as client:
                yield server, worker, client
        finally:
            await broker.close()
