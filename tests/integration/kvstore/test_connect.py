"""What a process is told about a broker it cannot use."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import pytest

from kvstore import client
from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from kvstore.errors import BrokerAuth, BrokerError, BrokerTooOld, BrokerUnreachable

from .conftest import on_both_servers
from .proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PASSWORD = "s3cret"


@pytest.fixture
async def guarded(broker_binary: Path) -> AsyncIterator[EmbeddedBroker]:
    """A server that could evict jobs, with a user who may not do everything."""
    async with EmbeddedBroker(binary=broker_binary, options={"maxmemory-policy": "allkeys-lru"}) as server:
        broker = await connect(BrokerConfig(server.url))
        rules = ("on", f">{PASSWORD}", "~*", "&*", "+@all", "-info")
        await broker.call("ACL", "SETUSER", "limited", *rules)
        await broker.close()
        yield server


async def test_nobody_there() -> None:
    started = time.monotonic()
    with pytest.raises(BrokerUnreachable) as caught:
        await connect(BrokerConfig(f"redis://user:{PASSWORD}@127.0.0.1:1/0", connect_patience_s=0.5))
    assert time.monotonic() - started < 5
    assert "redis://127.0.0.1:1/0" in str(caught.value)
    assert str(caught.value).endswith("; is a Redis running there, and are --redis and OCTAVO_REDIS right?")
    assert PASSWORD not in _everything(caught.value)


async def test_it_waits_for_a_broker_that_comes_up(broker_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Proxy("redis://127.0.0.1:1") as proxy:

        async def waiting() -> None:
            broker = await connect(BrokerConfig(proxy.url, connect_patience_s=10))
            await broker.close()

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0.3)
        assert not task.done()
        proxy.upstream = broker_url
        await task
    # Said once, not at each attempt.
    assert sum("cannot be reached" in record.getMessage() for record in caplog.records) == 1


@on_both_servers
async def test_wrong_password(guarded: EmbeddedBroker) -> None:
    started = time.monotonic()
    url = guarded.url.replace("//", "//limited:wrong@")
    with pytest.raises(BrokerAuth, match="refused access") as caught:
        await connect(BrokerConfig(url))
    assert time.monotonic() - started < 5
    assert "wrong@" not in _everything(caught.value)


@on_both_servers
async def test_a_user_who_may_not_look(guarded: EmbeddedBroker) -> None:
    with pytest.raises(BrokerAuth, match="info"):
        await connect(BrokerConfig(guarded.url.replace("//", f"//limited:{PASSWORD}@")))


@on_both_servers
async def test_a_broker_that_may_evict_jobs(guarded: EmbeddedBroker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        broker = await connect(BrokerConfig(guarded.url))
    await broker.close()
    assert ["allkeys-lru" in record.getMessage() for record in caplog.records] == [True]


@on_both_servers
async def test_no_warning_otherwise(broker_url: str, caplog: pytest.LogCaptureFixture) -> None:
    broker = await connect(BrokerConfig(broker_url))
    await broker.close()
    assert caplog.records == []


async def test_too_old(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FLOOR", (99, 0))
    with pytest.raises(BrokerTooOld, match=r"is version 7\..*99\.0 is the oldest"):
        await connect(BrokerConfig(broker_url))


@pytest.mark.parametrize(
    "url", ["", "localhost:6379", "http://localhost", f"redis://:{PASSWORD}/x@host:1", "redis://h:x"]
)
async def test_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="not a URL of a broker") as caught:
        await connect(BrokerConfig(url))
    assert PASSWORD not in _everything(caught.value)


async def test_a_url_cannot_undo_what_we_rely_on(broker_url: str) -> None:
    broker = await connect(BrokerConfig(broker_url + "?decode_responses=true&socket_timeout=1000&protocol=3"))
    assert await broker.call("ECHO", "x") == b"x"
    await broker.close()


@on_both_servers
async def test_errors_of_single_commands(broker_url: str, namespace: str) -> None:
    broker = await connect(BrokerConfig(broker_url, namespace))
    key = broker.keys.job("x")
    with pytest.raises(BrokerError, match="unknown command"):
        await broker.call("NOSUCHCOMMAND")
    await broker.call("SET", key, "x")
    good, bad, after = await broker.pipeline([("GET", key), ("XLEN", key), ("ECHO", "y")])
    assert (good, after) == (b"x", b"y")
    assert isinstance(bad, BrokerError)
    await broker.call("DEL", key)
    assert await broker.pipeline([]) == []
    await broker.close()


def _everything(error: BaseException) -> str:
    """All that a traceback would show of it and its causes."""
    shown = repr(error)
    for cause in (error.__cause__, None if error.__suppress_context__ else error.__context__):
        shown += _everything(cause) if cause else ""
    return shown
