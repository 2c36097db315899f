"""Serving goes on whatever becomes of the store of pages: it goes away, hangs, refuses, is full."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from kvstore.errors import BrokerFull
from tests.integration.worker.one_worker import running_worker
from tests.integration.worker.paging import POOL, A, B, C, Told, ask, count, event, told_at_least
from tests.support.waiting import until
from worker import fetch
from worker.config import PagesConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvstore.client import Broker

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
async def own_server(pages_binary: Path) -> AsyncIterator[EmbeddedBroker]:
    """For pages alone, with little memory."""
    async with EmbeddedBroker(binary=pages_binary, options={"maxmemory": "8mb"}) as server:
        yield server


async def test_serving_goes_on_without_the_store(
    broker: Broker, model_dir: Path, tmp_path: Path, own_server: EmbeddedBroker
) -> None:
    """A server for pages that goes away: every answer comes, and memory stays bounded."""
    config = PagesConfig(redis=own_server.url, buffer=200_000)
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        cold = [(await ask(fleet, prompt)).tokens for prompt in (A, B, C)]
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:
        assert [(await ask(fleet, prompt)).tokens for prompt in (A, B, C)] == cold
        await told_at_least(fleet, "stored", 10)
        await own_server.stop()
        for _ in range(4):
            assert [(await ask(fleet, prompt)).tokens for prompt in (A, B, C)] == cold
            assert count(fleet, "buffer_bytes") <= 200_000
        assert event(fleet, "dropped") > 0
        assert count(fleet, "errors_total", error="BrokerUnreachable") > 0
        assert count(fleet, "misses_total", reason="unreachable") > 0
        await fleet.idle()


async def test_a_store_that_hangs_is_given_up_and_used_again(
    broker: Broker, model_dir: Path, tmp_path: Path, own_server: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PagesConfig(redis=own_server.url, buffer=200_000)
    assert own_server.pid is not None
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:

        async def given_up() -> bool:
            return any(count(fleet, "errors_total", error=name) for name in ("TimeoutError", "BrokerUnreachable"))

        cold = [(await ask(fleet, prompt)).tokens for prompt in (A, B)]
        await told_at_least(fleet, "stored", 4)
        with monkeypatch.context() as hurried:
            hurried.setattr(fetch, "LEAST_LIMIT_S", 0.1)
            hurried.setattr(fetch, "LIMIT_S", 2.0)
            os.kill(own_server.pid, signal.SIGSTOP)
            try:
                for _ in range(3):
                    assert [(await ask(fleet, prompt)).tokens for prompt in (A, B)] == cold
                assert count(fleet, "misses_total", reason="late") > 0
                await until(given_up, within_s=40)  # that is told by calls that have more time than a prompt
            finally:
                os.kill(own_server.pid, signal.SIGCONT)
        adopted = event(fleet, "adopted")

        async def used_again() -> bool:
            assert [(await ask(fleet, prompt)).tokens for prompt in (A, B)] == cold
            return event(fleet, "adopted") > adopted

        await until(used_again, within_s=40)


@pytest.mark.parametrize("password", ["", ":wrong@"])
async def test_a_store_that_refuses_us(
    broker: Broker, model_dir: Path, tmp_path: Path, own_server: EmbeddedBroker, password: str
) -> None:
    closing = await connect(BrokerConfig(own_server.url))
    await closing.call("CONFIG", "SET", "requirepass", "secret")
    config = PagesConfig(redis=own_server.url.replace("//", f"//{password}"), buffer=200_000)
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        cold = (await ask(fleet, A)).tokens
    async with running_worker(broker, model_dir, tmp_path, pages=config) as fleet:
        assert await ask(fleet, A) == Told(cold, 0)
        assert count(fleet, "errors_total", error="BrokerAuth") > 0
    await closing.close()


async def test_a_full_store_keeps_what_it_can(
    broker: Broker, model_dir: Path, tmp_path: Path, own_server: EmbeddedBroker
) -> None:
    """Its memory is filled by others: pages are refused and dropped, jobs are served."""
    others = await connect(BrokerConfig(own_server.url))
    with suppress(BrokerFull):
        for number in itertools.count():
            await others.call("SET", f"ballast:{number}", bytes(50_000))
    config = PagesConfig(redis=own_server.url)
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        cold = [(await ask(fleet, prompt)).tokens for prompt in (A, B, C)]
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:
        for _ in range(2):
            assert [(await ask(fleet, prompt)).tokens for prompt in (A, B, C)] == cold
        await told_at_least(fleet, "refused", 1)
    await others.close()
