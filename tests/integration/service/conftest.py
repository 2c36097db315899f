"""A gateway and a worker with a tiny model, in this process on a real broker, and their client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.embedded import find_server
from octavo.v1.inference_pb2 import GetModelRequest
from ops.client import Client
from tests.integration.gateway.harness import running_gateway
from tests.integration.worker.one_worker import running_worker
from tests.support.tiny_model import save_tiny_llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvstore.client import Broker
    from tests.integration.worker.one_worker import Fleet


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here: what differs between them is tested with kvstore."""
    return find_server()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def fleet(broker: Broker, model_dir: Path, tmp_path: Path) -> AsyncIterator[Fleet]:
    """The worker."""
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        yield fleet


@pytest.fixture
async def target(broker: Broker, fleet: Fleet) -> AsyncIterator[str]:
    """Where the gateway listens."""
    async with running_gateway(broker) as (_, ready, client):
        await client.get_model(GetModelRequest())
        yield ready.grpc


@pytest.fixture
async def client(target: str) -> AsyncIterator[Client]:
    async with Client(target) as client:
        yield client
