"""A server that can be killed, and a proxy in front of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.chaos.proxy import Proxy
from bench.chaos.server import Server
from kvstore.client import Broker, BrokerConfig, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def server(broker_binary: Path, tmp_path: Path) -> AsyncIterator[Server]:
    """Started."""
    server = Server(tmp_path / "data", binary=broker_binary)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    """In front of it, wherever it is."""
    async with Proxy(server.port) as proxy:
        server.proxies.append(proxy)
        yield proxy


@pytest.fixture
async def through(proxy: Proxy, namespace: str) -> AsyncIterator[Broker]:
    """A connection through the proxy that tries each command once, for half a second."""
    broker = await connect(BrokerConfig(proxy.url, namespace, retries=0, command_timeout_s=0.5))
    yield broker
    await broker.close()


@pytest.fixture
async def direct(server: Server, namespace: str) -> AsyncIterator[Broker]:
    """A connection that no proxy is in the way of."""
    broker = await server.connect(namespace)
    yield broker
    await broker.close()
