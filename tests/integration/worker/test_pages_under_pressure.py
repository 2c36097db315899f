"""A server for pages with too little memory, or with none that may be used: answers are those of a cold run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from tests.integration.worker.one_worker import running_worker
from tests.integration.worker.paging import POOL, Told, ask, count, event, told_at_least
from tests.support.waiting import until
from worker.config import PagesConfig
from worker.pages import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvstore.client import Broker
    from tests.integration.worker.one_worker import Fleet

pytestmark = pytest.mark.usefixtures("patient")

PROMPTS = [tuple(2 + (7 * index + shift) % 200 for index in range(161)) for shift in range(12)]
"""Of ten pages each, a megabyte in all."""
ROOM = 500_000
"""Bytes that pages may take in the server, beside what it takes itself."""


@pytest.fixture
async def server(pages_binary: Path) -> AsyncIterator[EmbeddedBroker]:
    """For pages alone."""
    async with EmbeddedBroker(binary=pages_binary) as server:
        yield server


@pytest.fixture
async def pages_broker(server: EmbeddedBroker, namespace: str) -> AsyncIterator[Broker]:
    broker = await connect(BrokerConfig(server.url, namespace))
    yield broker
    await broker.close()


@pytest.fixture
async def cold(broker: Broker, model_dir: Path, tmp_path: Path) -> list[Told]:
    """Answers of a worker without pages, which finds nothing."""
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL) as fleet:
        return [await ask(fleet, prompt) for prompt in PROMPTS]


async def asked(fleet: Fleet, cold: list[Told]) -> None:
    """All prompts once, the last of them again: its pages have been stored a moment ago, if any have."""
    for prompt, expected in zip(PROMPTS, cold, strict=True):
        for _ in range(2):
            assert (await ask(fleet, prompt)).tokens == expected.tokens
    for prompt, expected in zip(PROMPTS[-3:], cold[-3:], strict=True):
        assert (await ask(fleet, prompt)).tokens == expected.tokens


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
async def test_a_server_that_evicts_pages_under_load(
    broker: Broker,
    model_dir: Path,
    tmp_path: Path,
    server: EmbeddedBroker,
    pages_broker: Broker,
    cold: list[Told],
    policy: str,
) -> None:
    """What it has evicted is a miss, and is not counted as stored for long; what it has is used."""
    config = PagesConfig(redis=server.url, budget=800_000)
    await pages_broker.call("CONFIG", "SET", "maxmemory-policy", policy)
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:
        assert [await ask(fleet, prompt) for prompt in PROMPTS[:2]] == cold[:2]
        used = (await pages_broker.call("INFO", "memory"))["used_memory"]
        await pages_broker.call("CONFIG", "SET", "maxmemory", used + ROOM)

        async def pressed() -> bool:
            await asked(fleet, cold)
            evicted = (await pages_broker.call("INFO", "stats"))["evicted_keys"]
            return bool(evicted > 20 and event(fleet, "adopted") and count(fleet, "misses_total", reason="absent"))

        await until(pressed, within_s=120)
        assert count(fleet, "errors_total", error="BrokerError") == 0
    await pages_broker.call("CONFIG", "SET", "maxmemory", 0)  # else it evicts while we look
    store = open_store(config, pages_broker.keys.namespace)

    async def mended() -> bool:
        usage = await store.tend()
        sizes = await pages_broker.call("HGETALL", pages_broker.keys.page_sizes)
        named = {name: int(size) for name, size in sizes.items() if name != b"total"}
        prefix = pages_broker.keys.prefix.encode() + b"page:"
        real = {name: await pages_broker.call("STRLEN", prefix + name) for name in named}
        assert usage.bytes <= config.budget
        return named == real and usage.bytes == sum(real.values())

    await until(mended, within_s=20)
    await store.close()


async def test_a_server_that_is_full_of_pages(
    broker: Broker, model_dir: Path, tmp_path: Path, server: EmbeddedBroker, pages_broker: Broker, cold: list[Told]
) -> None:
    """It evicts nothing by itself: the oldest pages make room for the next before it is full."""
    config = PagesConfig(redis=server.url)
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:
        assert [await ask(fleet, prompt) for prompt in PROMPTS[:2]] == cold[:2]
        used = (await pages_broker.call("INFO", "memory"))["used_memory"]
        most = int((used + ROOM) / 0.9)
        await pages_broker.call("CONFIG", "SET", "maxmemory", most)

        async def pressed() -> bool:
            await asked(fleet, cold)
            return event(fleet, "stored") > 200

        await until(pressed, within_s=120)
        memory = await pages_broker.call("INFO", "memory")
        assert memory["used_memory"] < most
        assert (await pages_broker.call("INFO", "stats"))["evicted_keys"] == 0
        assert event(fleet, "adopted") > 0
        assert count(fleet, "errors_total", error="BrokerFull") == 0
        left = await pages_broker.call("HLEN", pages_broker.keys.page_sizes) - 1
        assert 10 < left < 90, "of more than 200"


async def test_a_password_that_is_changed_under_way(
    broker: Broker, model_dir: Path, tmp_path: Path, server: EmbeddedBroker, pages_broker: Broker, cold: list[Told]
) -> None:
    """Serving goes on without the store, in bounded memory, and with it when it lets us in again."""
    config = PagesConfig(redis=server.url, buffer=200_000)
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:
        await asked(fleet, cold)
        await told_at_least(fleet, "adopted", 10)
        await pages_broker.call("CONFIG", "SET", "requirepass", "secret")
        await pages_broker.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async def refused() -> bool:
            await asked(fleet, cold)
            assert count(fleet, "buffer_bytes") <= config.buffer
            # Of a large request a server tells no more than that it has an error.
            return sum(count(fleet, "errors_total", error=name) for name in ("BrokerAuth", "BrokerError")) >= 2

        await until(refused, within_s=60)
        assert count(fleet, "misses_total", reason="unreachable") > 0
        await pages_broker.call("CONFIG", "SET", "requirepass", "")
        before = event(fleet, "adopted")

        async def used_again() -> bool:
            await asked(fleet, cold)
            return event(fleet, "adopted") > before

        await until(used_again, within_s=60)
        await fleet.idle()
