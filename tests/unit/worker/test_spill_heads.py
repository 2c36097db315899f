"""What stored pages continue: renewed with them, and read from the pool where the store lacks it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.page_store import PageRef
from tests.support.waiting import until
from tests.unit.worker.page_store import FORM, Shop, names
from tests.unit.worker.test_spill import has, pages, stored
from worker import circuit
from worker.heads import AHEAD_RANKS
from worker.spill import Spill

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from worker.heads import Place

HASHES = [name.hash for name in names(1, 2, 3, 4)]
PAGES = pages(1, 2, 3, 4)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "FIRST_S", 0.01)
    monkeypatch.setattr(circuit, "LONGEST_S", 0.02)


class World:
    """A spill, and what it wanted."""

    def __init__(self, buffer_pages: int) -> None:
        self.shop = Shop()
        self.asked: list[list[Place]] = []
        self.spill = Spill(self.shop.client, buffer_pages * FORM.page_bytes, want=self._want)

    def _want(self, places: Sequence[Place]) -> None:
        self.asked.append([*places])

    async def wanted(self, *asked: list[Place]) -> None:
        async def so_far() -> bool:
            return self.asked == [*asked]

        await until(so_far, within_s=10)


@asynccontextmanager
async def spilling(buffer_pages: int = 100) -> AsyncIterator[World]:
    world = World(buffer_pages)
    running = asyncio.create_task(world.spill.run())
    try:
        yield world
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await world.shop.client.close()


def heads(count: int) -> list[PageRef]:
    return [PageRef(hash_, position - AHEAD_RANKS) for position, hash_ in enumerate(HASHES[:count])]


async def test_they_are_renewed_in_the_same_call_and_not_again_with_the_next() -> None:
    async with spilling() as world:
        stored(world.shop, 1, 2)
        world.spill.continued([HASHES[:2]])
        world.spill.offer(PAGES[2:3])
        await has(world.shop, "stored", 1)
        assert world.shop.store.renewed == [[PageRef(HASHES[2], 2), *heads(2)]]
        world.spill.continued([HASHES[:3]])
        world.spill.offer(PAGES[3:])
        await has(world.shop, "stored", 2)
        assert world.shop.store.renewed[1] == [PageRef(HASHES[3], 3), heads(3)[2]]
        assert world.shop.events() == {"stored": 2}
        assert world.asked == []


async def test_those_of_pages_that_were_fetched_are_renewed_though_nothing_is_stored() -> None:
    async with spilling() as world:
        stored(world.shop, 1, 2)
        world.spill.continued([HASHES[:2]])

        async def renewed() -> bool:
            return world.shop.store.renewed == [heads(2)]

        await until(renewed, within_s=10)


async def test_those_that_the_store_lacks_are_wanted_and_stored() -> None:
    async with spilling() as world:
        stored(world.shop, 1)
        world.spill.continued([HASHES[:3]])
        world.spill.offer(PAGES[3:])
        await world.wanted([(HASHES[1], 1), (HASHES[2], 2)])
        world.spill.wanted(PAGES[1:3])
        await has(world.shop, "stored", 3)
        assert {*world.shop.store.values} == {*HASHES}
        assert world.shop.events() == {"stored": 3, "heads": 2}
        assert world.spill.leave(3) == 64, "all are told of"


async def test_no_more_are_wanted_than_there_is_room_for_and_the_next_when_those_have_come() -> None:
    async with spilling(buffer_pages=2) as world:
        world.spill.continued([HASHES[:3]])
        world.spill.offer(PAGES[3:])
        first = [(HASHES[0], 0), (HASHES[1], 1)]
        await world.wanted(first)
        world.spill.wanted(PAGES[:1])  # the second is not offered any more
        await world.wanted(first, [(HASHES[2], 2)])
        world.spill.wanted(PAGES[2:3])
        await has(world.shop, "stored", 3)
        assert world.shop.events() == {"stored": 3, "heads": 2}


async def test_a_store_that_fails_is_told_of_them_later() -> None:
    async with spilling() as world:
        stored(world.shop, 1)
        world.shop.store.fails = True
        world.spill.continued([HASHES[:1]])
        world.spill.offer(PAGES[1:2])

        async def tried() -> bool:
            return world.shop.count("errors_total", error="BrokerUnreachable") >= 2

        await until(tried, within_s=10)
        world.shop.store.fails = False
        await has(world.shop, "stored", 1)
        assert world.shop.store.renewed == [[PageRef(HASHES[1], 1), *heads(1)]]


@pytest.mark.parametrize("where", ["waiting", "wanted"])
async def test_what_is_in_doubt_by_then_is_not_stored(where: str) -> None:
    async with spilling() as world:
        world.spill.continued([HASHES[:1]])
        world.spill.offer(PAGES[3:])
        await world.wanted([(HASHES[0], 0)])
        world.shop.store.held.clear()
        world.spill.offer(pages(9))  # so that the next waits
        world.spill.wanted(PAGES[:1] if where == "waiting" else [])
        world.spill.doubt([HASHES[0]])
        world.shop.store.held.set()
        await has(world.shop, "doubted", 1)
        await has(world.shop, "stored", 2)
        assert {*world.shop.store.values} == {HASHES[3], names(9)[0].hash}
