"""Seconds without the server for pages: serving goes on, in bounded memory, and with pages afterwards."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from kvstore.embedded import EmbeddedBroker
from kvstore.registry import Registry
from tests.integration.kvstore.proxy import Proxy
from tests.integration.worker.one_worker import GATEWAY, running_worker
from tests.integration.worker.paging import POOL, A, B, C, ask, count, event, told_at_least
from tests.support.waiting import until
from worker import fetch
from worker.config import PagesConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvstore.client import Broker
    from tests.integration.worker.one_worker import Fleet

pytestmark = pytest.mark.usefixtures("patient")

PROMPTS = (A, B, C)
BUFFER = 200_000
ERRORS = ("TimeoutError", "BrokerUnreachable", "BrokerError")


class Server:
    """One for pages, behind an address that stays."""

    def __init__(self, binary: Path, proxy: Proxy) -> None:
        self._binary, self._proxy = binary, proxy
        self._server = EmbeddedBroker(binary=binary)

    async def start(self) -> None:
        self._proxy.upstream = await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    async def restart(self) -> None:
        """Without what it held."""
        self._server = EmbeddedBroker(binary=self._binary)
        await self.start()

    async def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    async def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._server.pid is not None
        os.kill(self._server.pid, number)


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with Proxy("redis://127.0.0.1:1") as proxy:
        yield proxy


@pytest.fixture
async def server(pages_binary: Path, proxy: Proxy) -> AsyncIterator[Server]:
    server = Server(pages_binary, proxy)
    await server.start()
    yield server
    await server.stop()


def failed(fleet: Fleet) -> float:
    return sum(count(fleet, "errors_total", error=name) for name in ERRORS)


@pytest.mark.parametrize(("how", "failures"), [("stopped", 5), ("frozen", 3)])
async def test_serving_goes_on_and_pages_are_used_again(
    broker: Broker,
    model_dir: Path,
    tmp_path: Path,
    server: Server,
    proxy: Proxy,
    how: str,
    failures: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The outage ends when so many calls have failed: what fails is left alone for half a second, then for twice as
    long each time, and a server that does not answer has two seconds. So that takes five seconds, more or less."""
    monkeypatch.setattr(fetch, "LEAST_LIMIT_S", 0.1)
    monkeypatch.setattr(fetch, "LIMIT_S", 2.0)
    config = PagesConfig(redis=proxy.url, buffer=BUFFER)
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        cold = [(await ask(fleet, prompt)).tokens for prompt in PROMPTS]
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:

        async def served() -> None:
            await Registry(broker).renew_gateway(GATEWAY)
            assert [(await ask(fleet, prompt)).tokens for prompt in PROMPTS] == cold
            assert count(fleet, "buffer_bytes") <= BUFFER

        async def given_up() -> bool:
            await served()
            return failed(fleet) >= failures

        async def used_again() -> bool:
            await served()
            return event(fleet, "adopted") > adopted and event(fleet, "stored") > stored

        await served()
        await told_at_least(fleet, "stored", 10)
        await (server.stop() if how == "stopped" else server.freeze())
        try:
            await until(given_up, within_s=90)
        finally:
            if how == "frozen":
                await server.thaw()
        assert event(fleet, "dropped") > 0
        adopted, stored = event(fleet, "adopted"), event(fleet, "stored")
        if how == "stopped":
            await server.restart()
        await until(used_again, within_s=60)
        await fleet.idle()
