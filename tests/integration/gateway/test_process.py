"""The gateway as a process: its ready line, its exit, and what a signal does to open streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.errors import STARTING
from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from octavo.v1 import inference_pb2
from tests.integration.gateway.harness import Client, chunks, collect, failed_stream, failure, request, tokens
from tests.integration.gateway.scripted import ScriptedWorker, chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from kvstore.client import Broker

Code = grpc.StatusCode
ROOT = Path(__file__).parents[3]
STOPPING = "the gateway is stopping; call another one"
CUT = "the gateway is stopping; the job may go on: call again with the same request_id and payload"


class GatewayProcess:
    """A running `python -m gateway`."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, str]) -> None:
        self.process = process
        self.ready = ready

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 10)


async def spawn(*arguments: str) -> asyncio.subprocess.Process:
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}", "OCTAVO_GRPC_PORT": "0"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **paths},
    )


@asynccontextmanager
async def running(broker: Broker, *arguments: str) -> AsyncIterator[tuple[GatewayProcess, Client]]:
    process = await spawn("--redis", broker.config.url, "--namespace", broker.config.namespace, *arguments)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
        assert line.startswith("ready ")
        gateway = GatewayProcess(process, json.loads(line.removeprefix("ready ")))
        client = Client(gateway.ready["grpc"])
        yield gateway, client
        await client.channel.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def serving(client: Client) -> int:
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    status: int = (await health.Check(health_pb2.HealthCheckRequest())).status
    return status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_finish(broker: Broker, worker: ScriptedWorker, number: signal.Signals) -> None:
    async with running(broker, "--grace", "10") as (gateway, client):
        assert set(gateway.ready) == {"grpc", "metrics", "http", "incarnation"}
        assert gateway.ready["http"] is None
        assert await serving(client) == health_pb2.HealthCheckResponse.SERVING
        call = client.generate(request("r1"))
        (claim,) = await worker.claim()
        assert claim.gateway == gateway.ready["incarnation"]
        await worker.commit(chunk(claim, 0, [10]))
        first = await call.read()
        health: Any = health_pb2_grpc.HealthStub(client.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        gateway.signal(number)
        assert (await asyncio.wait_for(watch.read(), 2)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await failure(client.generate(request("r2"))) == (Code.UNAVAILABLE, STOPPING)
        await worker.commit(chunk(claim, 1, [11]))
        await worker.commit(chunk(claim, 2, [12], finish=inference_pb2.STOP))
        assert tokens([first, *await collect(call)]) == [10, 11, 12]
        assert await gateway.exit_code() == 0
        # Nothing was cut off, so the lease was given back.
        assert not await worker.registry.live_gateways([gateway.ready["incarnation"]])


async def test_streams_that_outlast_the_grace_end_with_a_clear_error(broker: Broker, worker: ScriptedWorker) -> None:
    async with running(broker, "--grace", "0.3") as (gateway, client):
        calls = [client.generate(request(f"r{index}")) for index in range(4)]
        claims = await worker.claim(4)
        gateway.signal(signal.SIGTERM)
        endings = await asyncio.wait_for(asyncio.gather(*map(failure, calls)), 5)
        assert endings == [(Code.UNAVAILABLE, CUT)] * 4
        assert await gateway.exit_code() == 0
        # The jobs go on, for whoever attaches.
        assert worker.ended_outside.empty()
        for claim in claims:
            await worker.answer(claim)


async def test_streams_that_a_stopping_gateway_cuts_off_go_on_at_another(
    broker: Broker, worker: ScriptedWorker, client: Client
) -> None:
    """Token by token, as if there had been one call."""
    async with running(broker, "--grace", "0.2") as (gateway, stopping):
        call = stopping.generate(request("r1"))
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [10]), chunk(claim, 1, [11]))
        had = [await call.read()]
        gateway.signal(signal.SIGTERM)
        more, code, _ = await failed_stream(call)
        assert code is Code.UNAVAILABLE
        had += more
        assert not any(each.finish for each in chunks(had))
        assert await gateway.exit_code() == 0
    count = sum(len(each.token_ids) for each in chunks(had))
    going_on = client.attach(inference_pb2.AttachRequest(request_id="r1", after={0: count}))
    await going_on.initial_metadata()
    assert worker.ended_outside.empty()
    await worker.commit(chunk(claim, 2, [12], finish=inference_pb2.STOP))
    assert tokens([*had, *await collect(going_on)]) == [10, 11, 12]


async def test_a_second_signal_does_not_wait_for_the_grace(broker: Broker, worker: ScriptedWorker) -> None:
    async with running(broker, "--grace", "60") as (gateway, client):
        call = client.generate(request("r1"))
        (claim,) = await worker.claim()
        gateway.signal(signal.SIGTERM)
        assert await failure(client.generate(request("r2"))) == (Code.UNAVAILABLE, STOPPING)
        gateway.signal(signal.SIGTERM)
        assert await asyncio.wait_for(failure(call), 5) == (Code.UNAVAILABLE, CUT)
        assert await gateway.exit_code() == 0
        await worker.answer(claim)


async def test_a_gateway_without_streams_stops_at_once(broker: Broker, worker: ScriptedWorker) -> None:
    async with running(broker, "--grace", "60") as (gateway, client):
        call = client.generate(request("r1"))
        (claim,) = await worker.claim()
        await worker.answer(claim)
        await collect(call)
        gateway.signal(signal.SIGTERM)
        assert await gateway.exit_code() == 0


async def test_the_jobs_of_a_killed_gateway_are_for_the_next_one(broker: Broker, worker: ScriptedWorker) -> None:
    async with running(broker) as (gateway, client):
        call = client.generate(request("r1"))
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [10]))
        await call.read()
        gateway.signal(signal.SIGKILL)
        assert (await failure(call))[0] is Code.UNAVAILABLE
    async with running(broker) as (gateway, client):
        call = client.generate(request("r1"))
        await call.initial_metadata()
        await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
        assert tokens(await collect(call)) == [10, 11]


async def test_a_gateway_that_has_lost_its_broker_still_stops_well() -> None:
    async with EmbeddedBroker() as server:
        broker = await connect(BrokerConfig(server.url))
        async with running(broker) as (gateway, client):
            assert await failure(client.generate(request())) == (Code.UNAVAILABLE, f"no live worker; {STARTING}")
            await server.stop()
            gateway.signal(signal.SIGTERM)
            assert await gateway.exit_code() == 0
        await broker.close()


async def end(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit code and stderr of a process that ends by itself."""
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def test_a_start_that_fails_says_why(broker: Broker) -> None:
    url = broker.config.url
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        starts = (
            # Told before a broker that does not answer is waited for.
            ("--redis", f"redis://127.0.0.1:{port}/0", "--grpc-port", port),
            ("--redis", f"redis://127.0.0.1:{port}/0", "--metrics-port", port),
            ("--redis", f"redis://127.0.0.1:{port}/0", "--http-port", port),
            ("--redis", url, "--host", "192.0.2.1", "--insecure"),
            ("--redis", url.replace("redis://", "redis://:secret@")),
            ("--redis", "nonsense"),
        )
        processes = [await spawn(*arguments) for arguments in starts]
        endings = await asyncio.gather(*map(end, processes))
    taken_by = f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another port with"
    for (code, errors), reason in zip(
        endings,
        (
            f"{taken_by} --grpc-port, or any free one with --grpc-port 0",
            f"{taken_by} --metrics-port, or any free one with --metrics-port 0",
            f"{taken_by} --http-port, or any free one with --http-port 0",
            "Error: cannot listen on 192.0.2.1:0: Cannot assign requested address; see --host and --grpc-port",
            f"Error: broker at {url} refused access",
            "Error: not a URL",
        ),
        strict=True,
    ):
        assert code == 1
        (line,) = errors.splitlines()  # none of the libraries' own
        assert line.startswith(reason)
        assert "secret" not in errors
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--pages", "disk"), "Error: --pages disk is not none, redis or dir:PATH"),
        (
            ("--pages", "dir:x", "--pages-redis", "redis://127.0.0.1:1"),
            "Error: pages can't be both in dir:x and in a server: leave out --pages or --pages-redis",
        ),
    ],
)
async def test_pages_in_no_place_are_refused_before_the_broker_is_waited_for(
    arguments: tuple[str, ...], told: str
) -> None:
    process = await spawn("--redis", "redis://127.0.0.1:1", *arguments)
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, errors.decode().strip()) == (1, told)
