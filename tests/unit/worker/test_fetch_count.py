"""How many tokens have come for a request, by whichever fetch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.unit.worker.engine_run import BS, request
from tests.unit.worker.fetch_world import PROMPT, World
from tests.unit.worker.page_store import FORM
from worker import fetch as fetching

if TYPE_CHECKING:
    import pytest


async def test_what_was_brought_is_told() -> None:
    world = World()
    world.store(0, 1, 2, 4)
    assert await world.prepare() == 3 * BS
    assert await world.prepare() == 0, "the rest is not there"
    assert await world.fetch.prepare([], "a") == 0


async def test_a_store_that_fails_brings_nothing() -> None:
    world = World()
    world.store(0, 1)
    world.shop.store.fails = True
    assert await world.prepare() == 0


async def test_who_waits_for_anothers_fetch_is_told_of_it_as_far_as_it_is_his_prefix() -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    world.takes = False
    world.shop.store.held.clear()
    shorter = world.fetch.lacking(request("b", [*PROMPT[: 3 * BS], 9]))
    both = asyncio.gather(world.prepare(), world.fetch.prepare(shorter, "b"))
    await asyncio.sleep(0)
    world.shop.store.held.set()
    assert [*await both] == [5 * BS, 3 * BS]
    assert len(world.posted) == 1


async def test_what_the_engine_refused_by_then_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.page_client.FETCH_BYTES", 2 * FORM.value_bytes)
    world = World()
    world.store(0, 1, 2, 3, 4)
    pool = world.paging._pool
    table = pool.allocate(pool.total - 1)
    assert table is not None
    assert await world.prepare() == BS, "there is room for one"
    assert world.offered() == [0]


async def test_what_came_before_time_was_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.page_client.FETCH_BYTES", FORM.value_bytes)
    monkeypatch.setattr(fetching, "LIMIT_S", 0.3)
    world = World(buffer_pages=2)
    world.store(0, 1, 2, 3, 4)
    world.takes = False
    assert await world.prepare() == 2 * BS
