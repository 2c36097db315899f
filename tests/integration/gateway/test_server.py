"""What a gateway is beside its calls: health, reflection, metrics, and its lease."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.request import urlopen

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.config import PortError
from kvstore.registry import DRAINING, READY
from octavo.v1 import inference_pb2
from ops.fleet import port_of
from tests.integration.gateway.harness import (
    Client,
    collect,
    failure,
    fleet_of_its_own,
    request,
    running_gateway,
    tokens,
)
from tests.integration.gateway.scripted import ScriptedWorker, chunk

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from kvstore.client import Broker

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


INFERENCE, FLEET = "octavo.v1.Inference", "octavo.v1.Fleet"


async def health_of(client: Client, *names: str) -> list[int]:
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    return [(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names]


async def test_inference_is_healthy_only_while_a_live_worker_serves(broker: Broker) -> None:
    """The process is healthy all the time, and so is what needs no worker."""
    async with running_gateway(broker) as (_, _, client):
        health: Any = health_pb2_grpc.HealthStub(client.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == NOT_SERVING
        assert await health_of(client, "", FLEET) == [SERVING, SERVING]
        worker = ScriptedWorker(broker)
        await worker.start()
        assert (await asyncio.wait_for(watch.read(), 5)).status == SERVING
        worker.info = replace(worker.info, state=DRAINING)
        await worker.registry.renew(worker.info)
        assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        worker.info = replace(worker.info, state=READY)
        await worker.registry.renew(worker.info)
        assert (await asyncio.wait_for(watch.read(), 5)).status == SERVING
        await worker.stop()
        assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        assert await health_of(client, "", FLEET) == [SERVING, SERVING]
        unknown = health.Check(health_pb2.HealthCheckRequest(service="x"))
        assert (await failure(unknown))[0] is grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def test_gateways_that_share_a_port_serve_as_soon_as_they_listen(broker: Broker) -> None:
    """Connections come to each of them at once; who does not ask for it does not share."""
    worker = ScriptedWorker(broker)
    await worker.start()
    shared = {"reuse_port": True, "http_port": 0}
    async with running_gateway(broker, **shared) as (_, first, client):
        assert await health_of(client, INFERENCE) == [SERVING]
        assert first.http is not None
        ports = {"grpc_port": port_of(first.grpc), "http_port": port_of(first.http)}
        for alone in ({"grpc_port": ports["grpc_port"]}, {"http_port": ports["http_port"]}):
            with pytest.raises(PortError):
                async with running_gateway(broker, **alone):
                    pass
        async with running_gateway(broker, **{**shared, **ports}) as (_, second, _):
            assert (second.grpc, second.http) == (first.grpc, first.http)
            assert second.metrics != first.metrics
    await worker.stop()


async def test_reflection_lists_and_describes_the_services(client: Client) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    asked = (
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="octavo.v1.Inference"),
    )
    call = reflection.ServerReflectionInfo(iter(asked))
    listed, described = [answer async for answer in call]
    assert {each.name for each in listed.list_services_response.service} == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "octavo.v1.Fleet",
        "octavo.v1.Inference",
    }
    assert len(described.file_descriptor_response.file_descriptor_proto) == 1


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_finds_whatever_a_client_may_ask_for(client: Client, version: str) -> None:
    """Methods too, as `grpcurl describe` does; under both names that clients know."""
    reflect: Any = client.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    known = ("Inference", "Inference.Generate", "GenerateRequest", "Chunk.start", "Fleet.GetQueues")
    unknown = ("Inference.Nothing", "Nothing")
    asked = [
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"octavo.v1.{name}") for name in known + unknown
    ]
    answers = [answer async for answer in reflect(iter(asked))]
    files = [answer.file_descriptor_response.file_descriptor_proto for answer in answers]
    assert [FileDescriptorProto.FromString(each[0]).name.split("/")[-1] if each else "" for each in files] == [
        *("inference.proto",) * 4,
        "fleet.proto",
        *("",) * 2,
    ]
    assert [answer.error_response.error_code for answer in answers[-2:]] == [grpc.StatusCode.NOT_FOUND.value[0]] * 2


async def test_metrics_over_http(broker: Broker, worker: ScriptedWorker) -> None:
    async with running_gateway(broker) as (_, ready, client):
        calls = [client.generate(request(f"r{index}")) for index in range(3)]
        claims = {claim.job.request_id: claim for claim in await worker.claim(3)}
        await worker.answer(claims["r0"], tokens=4)
        await worker.commit(chunk(claims["r1"], 0, [], finish=inference_pb2.ERROR, error="non-finite logits"))
        assert len(tokens(await collect(calls[0]))) == 4
        await failure(calls[1])
        await failure(client.generate(request("bad id")))
        await failure(client.generate(request(model="nobody/has-this")))
        await failure(client.generate(request("r9", model="nobody/has-this")))

        def scrape() -> dict[str, float]:
            text = urlopen(f"http://{ready.metrics}/metrics", timeout=5).read().decode()
            lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
            return {name: float(value) for name, value in lines}

        seen: dict[str, float] = {}
        async with asyncio.timeout(5):
            while seen.get('octavo_queue_depth{state="pending",worker="w0"}') != 1:
                seen = await asyncio.to_thread(scrape)
        assert seen['octavo_requests_total{model="tiny",outcome="stop"}'] == 1
        assert seen['octavo_requests_total{model="tiny",outcome="internal"}'] == 1
        assert seen['octavo_requests_total{model="",outcome="invalid_argument"}'] == 1
        assert seen['octavo_requests_total{model="",outcome="not_found"}'] == 2
        assert seen["octavo_streams"] == 1
        assert seen["octavo_time_to_first_token_seconds_count"] == 1
        assert 1 <= seen["octavo_time_per_output_token_seconds_count"] <= 3
        assert seen["octavo_queue_seconds_count"] == 2
        for part in ("check", "tokenize", "send"):
            assert seen[f'octavo_part_seconds_count{{part="{part}"}}'] == 3
        assert seen['octavo_part_seconds_count{part="relay"}'] == seen["octavo_time_per_output_token_seconds_count"] + 2
        assert seen['octavo_broker_seconds_count{call="submit"}'] == 3
        assert seen['octavo_queue_depth{state="undelivered",worker="w0"}'] == 0
        assert seen['octavo_queue_oldest_seconds{worker="w0"}'] > 0
        assert not any("nobody" in name for name in seen)
        calls[2].cancel()
        async with asyncio.timeout(5):
            while seen["octavo_streams"] or seen['octavo_queue_depth{state="pending",worker="w0"}']:
                seen = await asyncio.to_thread(scrape)
        assert seen['octavo_requests_total{model="tiny",outcome="cancelled"}'] == 1


async def test_a_frozen_broker_degrades_health_and_streams_outlive_it(
    broker_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.reaper.LEASE_S", 1.0)  # instead of 3: only the waiting is shorter
    async with fleet_of_its_own(broker_binary) as (server, worker, client):
        call = client.generate(request("r1"))
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [10]))
        first = await call.read()
        health: Any = health_pb2_grpc.HealthStub(client.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=FLEET))
        assert (await watch.read()).status == SERVING
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
            assert await health_of(client, "", INFERENCE) == [SERVING, NOT_SERVING]
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert (await asyncio.wait_for(watch.read(), 10)).status == SERVING
        await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
        assert tokens([first, *await asyncio.wait_for(collect(call), 10)]) == [10, 11]
        watch.cancel()
