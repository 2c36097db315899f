"""What a new, idle worker fetches before it is asked for."""

from __future__ import annotations

import time

from tests.unit.worker.fetch_world import World


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
