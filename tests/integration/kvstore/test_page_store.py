"""Stores of pages: in Redis, in Valkey, and in a folder."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvstore.block_hash import BlockHash
from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from kvstore.errors import KvError
from kvstore.page_dir import DirPages
from kvstore.page_redis import RedisPages
from kvstore.page_store import PageLimits, PageRef, PageStore, StoredPage, Usage
from tests.integration.conftest import names, server_binary

from .conftest import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    Make = Callable[..., PageStore]

SIZE = 1000
MUCH = 1 << 30


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def value(number: int, size: int = SIZE) -> bytes:
    return bytes([number]) * size


def page(number: int, rank: int = 0, size: int = SIZE) -> StoredPage:
    return StoredPage(PageRef(hash_of(number), rank), value(number, size))


def hashes(*numbers: int) -> list[BlockHash]:
    return [hash_of(number) for number in numbers]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "redis", "folder"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """URL of a server, nothing for a folder."""
    if request.param == "folder":
        yield ""
        return
    async with EmbeddedBroker(binary=server_binary(request.param)) as server:
        yield server.url


@pytest.fixture
async def make(place: str, namespace: str, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes stores that share what they hold."""
    async with AsyncExitStack() as stack:

        def new(budget: int = MUCH, ttl_s: float = 60.0) -> PageStore:
            limits = PageLimits(budget, ttl_s)
            store: PageStore = RedisPages(place, namespace, limits) if place else DirPages(tmp_path / "p", limits)
            stack.push_async_callback(store.close)
            return store

        yield new
        if place:
            broker = await connect(BrokerConfig(place, namespace))
            for name in await names(broker):
                assert await broker.call("PTTL", name) > 0, name
            await broker.close()


async def test_what_is_put_is_there_for_all_who_ask(make: Make) -> None:
    one, other = make(), make()
    assert await one.put("f", [page(1), page(2, 1)]) == [True, True]
    assert await other.fetch("f", hashes(1, 2)) == [value(1), value(2)]
    assert await other.covered("f", hashes(1, 2)) == 2
    assert await other.tend() == Usage(2, 2 * SIZE)
    assert await other.put("f", [page(2, 1), page(3, 2)]) == [True, True]
    assert await one.tend() == Usage(3, 3 * SIZE)


async def test_models_do_not_meet(make: Make) -> None:
    store = make()
    await store.put("f", [page(1)])
    await store.put("g", [StoredPage(PageRef(hash_of(1), 0), b"g's")])
    assert await store.fetch("f", hashes(1)) == [value(1)]
    assert await store.fetch("g", hashes(1)) == [b"g's"]
    assert await store.hottest("g", 9) == hashes(1)
    await store.drop("g", hashes(1))
    assert await store.covered("f", hashes(1)) == 1
    assert await store.covered("g", hashes(1)) == 0


async def test_the_first_hole_ends_a_prefix(make: Make) -> None:
    store = make()
    await store.put("f", [page(1), page(2), page(4)])
    assert await store.covered("f", hashes(1, 2, 3, 4)) == 2
    assert await store.fetch("f", hashes(1, 2, 3, 4)) == [value(1), value(2)]
    assert await store.fetch("f", hashes(3, 4)) == []
    assert await store.renew("f", [PageRef(hash_, 0) for hash_ in hashes(1, 3, 4)]) == [True, False, True]
    assert await store.covered("f", []) == 0
    assert await store.fetch("f", []) == []
    assert await store.renew("f", []) == []
    assert await store.put("f", []) == []


async def test_over_the_budget_what_was_used_least_recently_goes(make: Make) -> None:
    store = make(budget=3 * SIZE)
    for number in (1, 2, 3):
        await store.put("f", [page(number)])
        await asyncio.sleep(0.002)  # the clock of a server has milliseconds
    await store.renew("f", [PageRef(hash_of(1), 0)])
    await asyncio.sleep(0.002)
    assert await store.put("f", [page(4)]) == [True]
    assert await store.hottest("f", 9) == hashes(4, 1, 3)
    assert await store.covered("f", hashes(2)) == 0
    assert await store.tend() == Usage(3, 3 * SIZE)
    assert await store.put("f", [page(5, size=2 * SIZE)]) == [True]
    assert await store.hottest("f", 9) == hashes(5, 4)
    assert await store.put("f", [page(6, size=3 * SIZE + 1)]) == [False]
    assert (await store.tend()).bytes == 3 * SIZE


async def test_of_a_prefix_the_end_goes_before_the_beginning(make: Make) -> None:
    store = make(budget=4 * SIZE)
    await store.put("f", [page(number, number) for number in range(4)])
    await store.renew("f", [PageRef(hash_of(number), number) for number in range(4)])
    assert await store.hottest("f", 9) == hashes(0, 1, 2, 3)
    await asyncio.sleep(0.002)
    await store.put("f", [page(8)])
    assert await store.hottest("f", 9) == hashes(8, 0, 1, 2)
    assert await store.hottest("f", 2) == hashes(8, 0)


async def test_what_counts_as_used_later_than_now_goes_after_all_that_is_used_until_then(make: Make) -> None:
    """Heads do, so that they need not be renewed with each of their tails."""
    store = make(budget=3 * SIZE)
    await store.put("f", [page(1), page(2, 1)])
    assert await store.renew("f", [PageRef(hash_of(1), -500), PageRef(hash_of(2), -499)]) == [True, True]
    for number in (3, 4, 5):
        await asyncio.sleep(0.002)
        await store.put("f", [page(number, 2)])
    assert await store.hottest("f", 9) == hashes(1, 2, 5)
    assert await store.tend() == Usage(3, 3 * SIZE)


async def test_a_smaller_budget_holds_from_the_next_look_on(make: Make) -> None:
    await make().put("f", [page(number, number) for number in range(6)])
    small = make(budget=2 * SIZE)
    assert await small.tend() == Usage(2, 2 * SIZE)
    assert await small.hottest("f", 9) == hashes(0, 1)


async def test_what_nobody_uses_is_forgotten(make: Make) -> None:
    store = make(ttl_s=0.3)
    await store.put("f", [page(1), page(2)])

    async def half_gone() -> bool:
        await store.renew("f", [PageRef(hash_of(1), 0)])
        return await store.covered("f", hashes(2)) == 0

    await until(half_gone, patience_s=5)
    assert await store.fetch("f", hashes(1, 2)) == [value(1)]
    assert await store.tend() == Usage(1, SIZE)
    assert await store.put("f", [page(2)]) == [True]
    assert await store.fetch("f", hashes(1, 2)) == [value(1), value(2)]


async def test_many_write_at_once(make: Make) -> None:
    stores = [make(budget=20 * SIZE) for _ in range(4)]
    await asyncio.gather(*(store.put("f", [page(n) for n in range(30)]) for store in stores))
    usage = await stores[0].tend()
    assert usage == Usage(20, 20 * SIZE)
    assert len(await stores[0].hottest("f", 99)) == 20


async def test_a_store_that_was_closed_fails_as_any_other(make: Make) -> None:
    store = make()
    await store.put("f", [page(1)])
    for _ in range(2):
        await store.close()
    ref = PageRef(hash_of(1), 0)
    for attempt in (
        *(store.covered("f", hashes(1)), store.fetch("f", hashes(1)), store.put("f", [page(2)]), store.tend()),
        *(store.renew("f", [ref]), store.drop("f", hashes(1)), store.hottest("f", 1)),
    ):
        with pytest.raises(KvError):
            await attempt
