"""Real servers for the integration tests: the packaged one and Debian's, each with its own run of every test."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvstore.client import Broker, BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker, find_server
from kvstore.jobs import Finished, Jobs
from kvstore.keys import GROUP

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def server_binary(kind: str) -> Path:
    """The server of that kind. Without Debian's the test is skipped, except in CI, where it fails."""
    if kind == "embedded":
        return find_server()
    found = shutil.which("redis-server")
    if found is None:
        message = "redis-server is not on PATH"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return Path(found)


@pytest.fixture(scope="session", params=["embedded", "redis"])
def broker_binary(request: pytest.FixtureRequest) -> Path:
    """For tests that need a server of their own, to fill it up or to kill it."""
    return server_binary(request.param)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def broker_url(broker_binary: Path) -> AsyncIterator[str]:
    """URL of a server that tests share: each in a namespace of its own."""
    async with EmbeddedBroker(binary=broker_binary) as server:
        yield server.url


@pytest.fixture
def namespace() -> str:
    """A fresh one."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def broker(broker_url: str, namespace: str) -> AsyncIterator[Broker]:
    """A connection in a fresh namespace, whose commands not even a busy machine makes time out. Afterwards, ending the
    jobs that still live must leave nothing behind."""
    broker = await connect(BrokerConfig(broker_url, namespace, command_timeout_s=20.0))
    try:
        yield broker
        await assert_nothing_leaks(broker)
    finally:
        await _delete_all(broker)
        await broker.close()


async def assert_nothing_leaks(broker: Broker) -> None:
    """Ends all jobs and asserts that what is left expires by itself, or is the empty frame of a worker."""
    keys = broker.keys
    jobs = Jobs(broker)
    for name in await names(broker):
        if name.startswith(keys.job("")) and await broker.call("HGET", name, "state") != b"ended":
            assert await jobs.cancel(name.removeprefix(keys.job(""))) is Finished.ENDED
    for name in await names(broker):
        if name.startswith(keys.jobs("")):
            assert await broker.call("XLEN", name) == 0, name
            groups = await broker.call("XINFO", "GROUPS", name)
            if groups:
                assert (await broker.call("XPENDING", name, GROUP))["pending"] == 0, name
        elif name not in (keys.workers, keys.ledger, keys.batches):
            assert await broker.call("PTTL", name) > 0, name


async def names(broker: Broker) -> list[str]:
    """Every key of the broker's namespace."""
    cursor, found = 0, set()
    while True:
        cursor, page = await broker.call("SCAN", cursor, "MATCH", broker.keys.prefix + "*", "COUNT", 1000)
        found |= {name.decode() for name in page}
        if cursor == 0:
            return sorted(found)


async def _delete_all(broker: Broker) -> None:
    for name in await names(broker):
        await broker.call("DEL", name)
