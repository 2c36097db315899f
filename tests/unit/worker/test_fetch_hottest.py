"""What a new, idle worker fetches before it is asked for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from kvstore.page import names_of
from tests.support.waiting import until
from tests.unit.worker.fetch_world import PROMPT, World
from tests.unit.worker.page_store import FORM


async def test_the_hottest_go_into_free_blocks_while_there_are_no_jobs() -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    busy = [True, True, False]
    seen: list[bool] = []

    def is_busy() -> bool:
        seen.append(busy[min(len(seen), 2)])
        return seen[-1]

    assert await world.fetch.fetch_hottest(3, is_busy, time.monotonic() + 10) == 3
    assert seen == busy
    assert world.offered() == [0, 1, 2]
    assert await world.fetch.fetch_hottest(0, is_busy, time.monotonic() + 10) == 0
    assert await world.fetch.fetch_hottest(5, is_busy, time.monotonic() - 1) == 0
    assert world.offered() == [0, 1, 2]


async def test_a_busy_worker_does_not_fetch_them_at_all() -> None:
    world = World()
    world.store(0, 1)
    assert await world.fetch.fetch_hottest(5, lambda: True, time.monotonic() + 0.3) == 0
    assert world.shop.store.calls == ["hottest"]


async def test_the_hottest_that_are_damaged_or_without_a_beginning_are_left_out() -> None:
    world = World()
    world.store(1, 2, 0)
    first = world.names[0].hash
    world.shop.store.values[first] = world.shop.store.values[first].replace(b"octavo", b"OCTAVO")
    await world.fetch.fetch_hottest(5, lambda: False, time.monotonic() + 10)
    assert world.offered() == []
    assert world.shop.misses() == {"not_a_page": 1}
    world.engine.check_integrity()


async def test_what_fleets_with_other_blocks_stored_under_the_same_fingerprint_stays_there() -> None:
    """Each of them would otherwise delete what the others have. What is damaged goes, and ends nothing here."""
    world = World()
    other = replace(FORM, block_size=2 * FORM.block_size)
    theirs = names_of(world.engine.root_of("other"), tuple(PROMPT), other.block_size)
    values = world.shop.store.values
    values[theirs[0].hash] = other.encode(theirs[0], bytes(FORM.page_bytes))
    world.store(0, 1)
    values[theirs[1].hash] = other.encode(theirs[1], bytes(FORM.page_bytes))[:-1]
    world.store(2)
    assert await world.fetch.fetch_hottest(9, lambda: False, time.monotonic() + 10) == 3
    assert world.offered() == [0, 1, 2]
    assert world.shop.misses() == {"truncated": 1}
    assert {*values} == {theirs[0].hash, *(name.hash for name in world.names[:3])}


async def test_what_is_on_its_way_is_not_read_again() -> None:
    """Some page of a request's is in the engine's hands, and another one is being read."""
    world = World()
    world.store(0, 1, 2, 3, 4)
    world.takes = False
    await world.prepare()
    assert await world.fetch.fetch_hottest(5, lambda: False, time.monotonic() + 10) == 0
    world.take()
    assert world.shop.store.calls == ["covered", "fetch", "hottest"]
    assert world.offered() == [0, 1, 2, 3, 4]


async def test_a_request_waits_for_what_is_read_already() -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    gate = world.shop.store.held

    def is_busy() -> bool:
        gate.clear()
        return False

    async def reads() -> bool:
        return len(world.shop.store.calls) == 2

    warming = asyncio.create_task(world.fetch.fetch_hottest(5, is_busy, time.monotonic() + 10))
    await until(reads, within_s=5)
    asking = asyncio.create_task(world.prepare())
    await asyncio.sleep(0)
    gate.set()
    assert (await warming, await asking) == (5, 5 * FORM.block_size)
    assert world.shop.store.calls == ["hottest", "fetch"]
