"""Pages in a server: what it has besides, and what is wrong with it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Broker, BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from kvstore.errors import BrokerAuth, BrokerError, BrokerFull, BrokerUnreachable, BrokerUrl
from kvstore.page_redis import RedisPages
from kvstore.page_store import PageLimits, PageRef, StoredPage, Usage

from .conftest import on_both_servers, server_time_ms, until
from .test_page_store import MUCH, SIZE, hash_of, hashes, page, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


@asynccontextmanager
async def server_of(binary: Path, **options: str) -> AsyncIterator[tuple[EmbeddedBroker, Broker]]:
    given = {name.replace("_", "-"): option for name, option in options.items()}
    async with EmbeddedBroker(binary=binary, options=given) as server:
        broker = await connect(BrokerConfig(server.url, "ns"))
        yield server, broker
        await broker.close()


@on_both_servers
async def test_pages_leave_the_last_tenth_of_a_servers_memory_to_jobs(broker_binary: Path) -> None:
    async with server_of(broker_binary, maxmemory="24mb") as (server, broker), closing_of(server.url) as store:
        stored = [(await store.put("f", [page(number, size=1 << 20)]))[0] for number in range(40)]
        assert all(stored)
        used = (await broker.call("INFO", "memory"))["used_memory"]
        assert used < 0.95 * 24 * 2**20
        assert 5 < (await store.tend()).pages < 24
        # Others fill it up: pages give way the next time that somebody looks.
        full, count = False, 0
        while not full:
            try:
                await broker.call("SET", f"ballast:{(count := count + 1)}", bytes(1 << 16))
            except BrokerFull:
                full = True

        async def gave_way() -> bool:  # memory is given back a moment later
            await store.tend()
            return bool((await broker.call("INFO", "memory"))["used_memory"] < 0.92 * 24 * 2**20)

        await until(gave_way)
        await broker.call("SET", "a job", bytes(1 << 16))


@asynccontextmanager
async def closing_of(url: str, limits: PageLimits | None = None) -> AsyncIterator[RedisPages]:
    store = RedisPages(url, "ns", limits or PageLimits(MUCH, 60.0))
    try:
        yield store
    finally:
        await store.close()


@on_both_servers
async def test_a_server_that_evicts_by_itself_may_evict_anything(broker_binary: Path) -> None:
    """Pages, and the accounts of them: what is asked for is a miss, and the accounts come right again."""
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        await store.put("f", [page(number, number) for number in range(6)])
        await broker.call("DEL", broker.keys.page("f", hash_of(3).hex()))
        assert await store.covered("f", hashes(*range(6))) == 3
        assert await store.renew("f", [PageRef(hash_of(n), n) for n in range(6)]) == [True] * 3 + [False] + [True] * 2
        assert await store.tend() == Usage(5, 5 * SIZE)
        for key in (broker.keys.pages, broker.keys.page_sizes):
            await broker.call("DEL", key)
            assert await store.tend() == Usage(0, 0)
            assert await store.fetch("f", hashes(0)) == [value(0)]
            assert await store.put("f", [page(n, n) for n in range(3)]) == [True] * 3
            assert await store.tend() == Usage(3, 3 * SIZE)
        await broker.call("FLUSHALL")
        assert await store.fetch("f", hashes(0)) == []
        await store.put("f", [page(1)])
        assert await store.tend() == Usage(1, SIZE)


async def test_what_somebody_else_wrote_is_passed_over(broker_binary: Path) -> None:
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        await store.put("f", [page(1)])
        later = await server_time_ms(broker) + 1000
        for name in (b"f:no hex", b"f:\xff", b"f:00"):
            await broker.call("ZADD", broker.keys.pages, later, name)
        assert await store.hottest("f", 1) == hashes(1)
        assert store._broker.malformed == 3
        for total in ("much", "-5", "1.5", "007", "9223372036854775807", "9" * 5000):
            await broker.call("HSET", broker.keys.page_sizes, "total", total)
            assert await store.tend() == Usage(0, 0)
            # The accounts are right again; the page itself was there all the time.
            assert await store.renew("f", [PageRef(hash_of(1), 0)]) == [True]
            assert await store.tend() == Usage(1, SIZE)


@pytest.mark.parametrize("account", ["pages", "page_sizes"])
@pytest.mark.parametrize("call", ["put", "renew", "drop", "hottest", "tend"])
async def test_accounts_of_another_type_are_begun_anew_by_whatever_call(
    broker_binary: Path, account: str, call: str
) -> None:
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        await store.put("f", [page(1)])
        for command in ("SET", "RPUSH", "SADD"):
            await broker.call("DEL", getattr(broker.keys, account))
            await broker.call(command, getattr(broker.keys, account), "junk")
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "put": lambda: store.put("f", [page(2)]),
                "renew": lambda: store.renew("f", [PageRef(hash_of(1), 0)]),
                "drop": lambda: store.drop("f", hashes(3)),
                "hottest": lambda: store.hottest("f", 9),
                "tend": store.tend,
            }
            await calls[call]()
            assert await store.put("f", [page(1), page(2)]) == [True, True]
            assert await store.tend() == Usage(2, 2 * SIZE)


async def test_keys_of_another_type_in_the_place_of_pages_are_no_pages(broker_binary: Path) -> None:
    """They are misses, and what is stored next takes their place; the pages beside them are as they were."""
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        refs = [PageRef(hash_of(number), number) for number in range(4)]
        for call in ("put", "renew", "drop"):
            assert await store.put("f", [page(number, number) for number in range(4)]) == [True] * 4
            key = broker.keys.page("f", hash_of(2).hex())
            await broker.call("DEL", key)
            await broker.call("RPUSH", key, "junk")
            assert await store.covered("f", hashes(0, 1, 2, 3)) == 2
            assert await store.fetch("f", hashes(0, 1, 2, 3)) == [value(0), value(1)]
            if call == "put":
                assert await store.put("f", [page(number, number) for number in range(4)]) == [True] * 4
                assert await store.covered("f", hashes(0, 1, 2, 3)) == 4
                assert await store.tend() == Usage(4, 4 * SIZE)
                continue
            if call == "renew":
                assert await store.renew("f", refs) == [True, True, False, True]
            else:
                await store.drop("f", hashes(2))
            assert await broker.call("EXISTS", key) == 0
            assert await store.tend() == Usage(3, 3 * SIZE)


async def test_what_is_no_size_is_not_counted_with(broker_binary: Path) -> None:
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        for size in ("much", "-5", "1.5", "1e300", "9223372036854775807", "9" * 5000):
            await store.put("f", [page(1), page(2)])
            await broker.call("HSET", broker.keys.page_sizes, f"f:{hash_of(1).hex()}", size)
            await store.drop("f", hashes(1))
            assert await store.tend() == Usage(1, SIZE)


async def test_one_call_drops_a_thousand_pages_at_most(broker_binary: Path) -> None:
    """A server that makes room for one page must not keep jobs waiting for seconds."""
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        many = [StoredPage(PageRef(hash_of(number), 2500 - number), b"x") for number in range(2500)]
        await store.put("f", many)
        last = StoredPage(PageRef(hash_of(2501), 0), b"x")
        async with closing_of(server.url, PageLimits(10, 60.0)) as small:
            assert await small.put("f", [last]) == [False]
            assert await broker.call("ZCARD", broker.keys.pages) == 1500
            assert await small.put("f", [last] * 2) == [False, True]
            assert await small.tend() == Usage(10, 10)
        await store.put("f", many)
        async with closing_of(server.url, PageLimits(10, 60.0)) as small:
            assert await small.tend() == Usage(10, 10)


@on_both_servers
async def test_what_is_wrong_with_a_server_has_a_name(broker_binary: Path) -> None:
    with pytest.raises(BrokerUrl):
        RedisPages("nonsense", "ns", PageLimits(1, 1.0))
    async with server_of(broker_binary) as (server, _), closing_of(server.url) as store:
        await store.put("f", [page(1)])
        await server.stop()
        with pytest.raises(BrokerUnreachable):
            await store.put("f", [page(1)])


@on_both_servers
async def test_a_wrong_password_is_told(broker_binary: Path) -> None:
    async with EmbeddedBroker(binary=broker_binary) as server:
        broker = await connect(BrokerConfig(server.url))
        await broker.call("CONFIG", "SET", "requirepass", "secret")
        for url in (server.url, server.url.replace("//", "//:wrong@")):
            async with closing_of(url) as store:
                for attempt in (store.put("f", [page(1)]), store.fetch("f", hashes(1)), store.covered("f", hashes(1))):
                    with pytest.raises(BrokerError):  # of a large request a server tells no more than that
                        await attempt
                with pytest.raises(BrokerAuth):
                    await store.covered("f", hashes(1))
        await broker.close()


async def test_a_slow_server_does_not_turn_a_prefix_round(broker_binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put last, moments later, does not count as used last."""
    async with server_of(broker_binary) as (server, _), closing_of(server.url) as store:
        script = store._script

        async def slow(*given: Any) -> list[int]:
            await asyncio.sleep(0.03)
            return await script(*given)

        monkeypatch.setattr(store, "_script", slow)
        await store.put("f", [page(number, number) for number in range(4)])
        assert await store.hottest("f", 9) == hashes(0, 1, 2, 3)
