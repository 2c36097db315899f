"""Pages in a server that evicts by itself: what it has evicted is not counted for long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.page_store import PageRef, Usage

from .conftest import on_both_servers, until
from .test_page_redis import closing_of, server_of
from .test_page_store import SIZE, hash_of, hashes, page

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker
    from kvstore.page_redis import RedisPages


async def accounted(broker: Broker) -> dict[str, int]:
    """Sizes of pages by name, as they are accounted for."""
    sizes = await broker.call("HGETALL", broker.keys.page_sizes)
    found = {name.decode(): int(size) for name, size in sizes.items()}
    assert found.pop("total", 0) == sum(found.values())
    assert await broker.call("ZCARD", broker.keys.pages) == len(found)
    return found


async def lengths(broker: Broker, names: Any) -> dict[str, int]:
    """What the pages of these names really are."""
    return {name: await broker.call("STRLEN", f"{broker.keys.prefix}page:{name}") for name in names}


async def mended(store: RedisPages, broker: Broker) -> Usage:
    """Once the accounts have nothing that isn't there."""

    async def right() -> Usage | None:
        usage = await store.tend()
        names = await accounted(broker)
        return usage if await lengths(broker, names) == names else None

    found = await until(right)
    assert found is not None
    return found


async def test_what_was_evicted_is_found_though_nobody_asks_for_it(broker_binary: Path) -> None:
    """Also in the middle of those used last, and without a look at all of them."""
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        await store.put("f", [page(number % 256, number)._replace(ref=_ref(number)) for number in range(400)])
        gone = [number for number in range(400) if number % 4]
        await broker.call("DEL", *(broker.keys.page("f", hash_of(number).hex()) for number in gone))
        assert (await store.tend()).pages < 250, "one look finds most of them"
        assert await mended(store, broker) == Usage(100, 100 * SIZE)
        assert await store.covered("f", hashes(0, 4, 8)) == 3


def _ref(number: int) -> PageRef:
    return PageRef(hash_of(number), number)


async def test_a_look_costs_what_is_there_nothing(broker_binary: Path) -> None:
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        assert await store.tend() == Usage(0, 0)
        await store.put("f", [page(number, number) for number in range(100)])
        for _ in range(3):
            assert await store.tend() == Usage(100, 100 * SIZE)
        assert len(await accounted(broker)) == 100


async def test_no_more_than_a_thousand_are_dropped_in_one_call_all_the_same(broker_binary: Path) -> None:
    async with server_of(broker_binary) as (server, broker), closing_of(server.url) as store:
        await store.put("f", [page(1, size=1)._replace(ref=_ref(number)) for number in range(2500)])
        await broker.call("DEL", *(broker.keys.page("f", hash_of(number).hex()) for number in range(2500)))
        assert await store._script("put", ()) == [1]
        left = len(await accounted(broker))
        assert 1400 <= left <= 1500
        assert await store.tend() == Usage(0, 0)


@on_both_servers
@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "allkeys-lfu", "volatile-ttl"])
async def test_whatever_a_full_server_evicts_the_accounts_come_right(broker_binary: Path, policy: str) -> None:
    async with server_of(broker_binary, maxmemory_policy=policy) as (server, broker), closing_of(server.url) as store:
        await store.put("f", [page(0, size=20_000)])
        used = (await broker.call("INFO", "memory"))["used_memory"]
        await broker.call("CONFIG", "SET", "maxmemory", used + 1_000_000)
        stored = 0
        for number in range(1, 250):
            stored += sum(await store.put("f", [page(number, size=20_000)]))
            await store.fetch("f", hashes(number // 2))
        assert (await broker.call("INFO", "stats"))["evicted_keys"] > 50
        assert stored > 200, "it makes room by itself"
        await broker.call("CONFIG", "SET", "maxmemory", 0)  # else it evicts while we look
        usage = await mended(store, broker)
        assert usage.pages < 60
        there = sum((await lengths(broker, [f"f:{hash_of(number).hex()}" for number in range(250)])).values())
        assert there <= 1_200_000
        assert usage.bytes <= there, "what was forgotten with the accounts is there still, for its time"
