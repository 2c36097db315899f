"""One gateway and one scripted worker, with a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.embedded import find_server
from octavo.v1.inference_pb2 import GetModelRequest
from tests.integration.gateway.harness import Client, running_gateway
from tests.integration.gateway.http_client import HttpClient
from tests.integration.gateway.scripted import ScriptedWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from gateway.server import Gateway
    from kvstore.client import Broker


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here: what differs between them is tested with kvstore."""
    return find_server()


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[ScriptedWorker]:
    """Registered and breathing."""
    worker = ScriptedWorker(broker)
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def stage(broker: Broker, worker: ScriptedWorker) -> AsyncIterator[tuple[Gateway, Client]]:
    """A gateway that knows the worker, and its client."""
    async with running_gateway(broker) as (gateway, _, client):
        # Deadlines and timings in the tests are not about the first look at a model.
        await client.get_model(GetModelRequest())
        yield gateway, client


@pytest.fixture
def gateway(stage: tuple[Gateway, Client]) -> Gateway:
    """The gateway of the stage."""
    return stage[0]


@pytest.fixture
def client(stage: tuple[Gateway, Client]) -> Client:
    """The client of the stage."""
    return stage[1]


@pytest.fixture
async def http(broker: Broker, worker: ScriptedWorker) -> AsyncIterator[HttpClient]:
    """A client by HTTP of a gateway that knows the worker."""
    async with running_gateway(broker, http_port=0) as (gateway, ready, client):
        await client.get_model(GetModelRequest())
        async with HttpClient(gateway, ready) as http:
            yield http
