"""Pages on their way out: in bounded memory, in order, and without a word when the store fails."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.page_store import PageRef
from tests.support.waiting import until
from tests.unit.worker.page_store import FORM, Shop, names
from worker import circuit
from worker.spill import MOST_A_STEP, Spill
from worker.step import Spilled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvstore.page import PageName


def pages(*blocks: int) -> list[Spilled]:
    return [Spilled(name, bytes([name.position]) * FORM.page_bytes) for name in names(*blocks)]


def stored(shop: Shop, *blocks: int) -> None:
    """Already there."""
    for page in pages(*blocks):
        shop.store.values[page.name.hash] = FORM.encode(page.name, page.payload)


@asynccontextmanager
async def spilling(buffer_pages: int = 100) -> AsyncIterator[tuple[Shop, Spill]]:
    shop = Shop()
    spill = Spill(shop.client, buffer_pages * FORM.page_bytes + 5)
    running = asyncio.create_task(spill.run(), name="spill")
    try:
        yield shop, spill
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await shop.client.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "FIRST_S", 0.01)
    monkeypatch.setattr(circuit, "LONGEST_S", 0.02)


async def has(shop: Shop, event: str, count: int) -> None:
    async def enough() -> bool:
        return shop.events().get(event, 0) >= count

    await until(enough, within_s=10)


async def test_what_leaves_the_pool_is_stored_and_can_be_read() -> None:
    async with spilling() as (shop, spill):
        spill.offer(pages(1, 2, 3))
        await has(shop, "stored", 3)
        for page in pages(1, 2, 3):
            assert FORM.decode(shop.store.values[page.name.hash], page.name) == page.payload
        assert shop.events() == {"stored": 3}
        assert shop.count("bytes_total", direction="out") == 3 * FORM.value_bytes
        assert shop.count("buffer_bytes") == 0
        assert spill.leave(3) == MOST_A_STEP


async def test_what_is_there_is_renewed_and_not_written() -> None:
    async with spilling() as (shop, spill):
        stored(shop, 1, 2)
        spill.offer(pages(1, 2, 3))
        await has(shop, "stored", 1)
        assert shop.events() == {"stored": 1, "renewed": 2}


async def test_what_finds_no_room_is_dropped() -> None:
    async with spilling(buffer_pages=3) as (shop, spill):
        shop.store.held.clear()
        assert spill.leave(0) == 3
        assert spill.leave(2) == 1, "two were read, and are not told of yet"
        assert spill.leave(4) == 0
        spill.offer(pages(1, 2))
        assert spill.leave(2) == 1
        await until(lambda: asked(shop), within_s=10)
        spill.offer(pages(3, 4, 5))  # those being written take room as well
        assert spill.leave(5) == 0
        assert shop.count("buffer_bytes") == 3 * FORM.page_bytes
        spill.passed_over(4)
        shop.store.held.set()
        await has(shop, "stored", 3)
        assert shop.events() == {"stored": 3, "dropped": 6}
        assert [*shop.store.values] == [page.name.hash for page in [*pages(1, 2), *pages(3)]]


async def asked(shop: Shop) -> bool:
    return bool(shop.store.calls)


async def test_a_store_that_fails_is_waited_for() -> None:
    async with spilling(buffer_pages=3) as (shop, spill):
        shop.store.fails = True
        spill.offer(pages(1, 2, 3))

        async def tried() -> bool:
            return shop.count("errors_total", error="BrokerUnreachable") >= 3

        await until(tried, within_s=10)
        assert spill.leave(3) == 0
        shop.store.fails = False
        await has(shop, "stored", 3)
        assert [*shop.store.values] == [page.name.hash for page in pages(1, 2, 3)]


async def test_a_page_that_the_store_fails_on_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with spilling() as (shop, spill):
        put = shop.store.put

        async def fails(*_: object) -> list[bool]:
            monkeypatch.setattr(shop.store, "put", put)
            raise ConnectionError("too much for me")

        monkeypatch.setattr(shop.store, "put", fails)
        spill.offer(pages(1, 2))
        await has(shop, "dropped", 2)
        spill.offer(pages(3))
        await has(shop, "stored", 1)
        assert shop.count("errors_total", error="ConnectionError") == 1


async def test_a_page_that_can_not_be_encoded_costs_no_other() -> None:
    async with spilling() as (shop, spill):
        (wrong,) = pages(1)
        spill.offer([wrong._replace(payload=b"too short")])
        await has(shop, "dropped", 1)
        spill.offer(pages(2))
        await has(shop, "stored", 1)
        assert spill.leave(2) == MOST_A_STEP


async def test_what_the_store_has_no_room_for_is_told() -> None:
    async with spilling() as (shop, spill):
        shop.store.room = 2
        spill.offer(pages(1, 2, 3))
        await has(shop, "refused", 1)
        assert shop.events() == {"stored": 2, "refused": 1}


async def test_one_page_is_stored_however_large_it_is() -> None:
    async with spilling(buffer_pages=0) as (shop, spill):
        assert spill.leave(0) == 1
        spill.offer(pages(1))
        await has(shop, "stored", 1)


async def test_what_is_in_doubt_goes_before_anything_else_and_is_not_stored() -> None:
    async with spilling() as (shop, spill):
        good, (bad,), written = pages(1), pages(2), pages(3)
        stored(shop, 2)
        stored(shop, 3)
        shop.store.held.clear()
        spill.offer(written)
        await until(lambda: asked(shop), within_s=10)
        spill.offer([bad, *good])
        spill.doubt([bad.name.hash, written[0].name.hash])
        assert spill.leave(3) == MOST_A_STEP
        shop.store.fails = True  # a deletion that fails is made good
        shop.store.held.set()

        async def tried() -> bool:
            return shop.count("errors_total", error="BrokerUnreachable") >= 2

        await until(tried, within_s=10)
        shop.store.fails = False
        await has(shop, "stored", 1)
        assert [*shop.store.values] == [good[0].name.hash]
        assert shop.events() == {"stored": 1, "doubted": 2, "dropped": 2}
        assert shop.count("buffer_bytes") == 0
        again = pages(2)  # computed anew
        spill.offer(again)
        await has(shop, "stored", 2)


@pytest.mark.parametrize("doubted", [False, True])
async def test_what_is_under_way_when_the_worker_ends_is_done_at_the_end(*, doubted: bool) -> None:
    async with spilling() as (shop, spill):
        stored(shop, 9)
        shop.store.held.clear()
        spill.offer(pages(1, 2))
        if doubted:
            spill.doubt([names(9)[0].hash])
        await until(lambda: asked(shop), within_s=10)
        (running,) = [task for task in asyncio.all_tasks() if task.get_name() == "spill"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        shop.store.held.set()
        await spill.delete_doubted(time.monotonic() + 10)
        assert shop.events() == ({"doubted": 1} if doubted else {})
        await spill.flush(time.monotonic() + 10)
        assert shop.events()["stored"] == 2
        assert shop.count("buffer_bytes") == 0
        assert (names(9)[0].hash in shop.store.values) is not doubted


async def test_uses_are_told() -> None:
    async with spilling() as (shop, spill):
        spill.used([PageRef(name.hash, name.position) for name in names(1, 2)])

        async def told() -> bool:
            return shop.store.calls == ["renew"]

        await until(told, within_s=10)


async def read(some: Sequence[PageName]) -> list[Spilled]:
    return [Spilled(name, bytes(FORM.page_bytes)) for name in some if name.position != 2]


async def test_what_the_pool_has_cached_is_saved_hottest_first_as_far_as_there_is_room() -> None:
    async with spilling() as (shop, spill):
        stored(shop, 1)
        wanted = names(1, 2, 3, 4, 5)  # the third is offered no more when it is read
        assert await spill.save(wanted, read, 4 * FORM.value_bytes, time.monotonic() + 10) == 3
        assert [*shop.store.values] == [wanted[index].hash for index in (0, 1, 3)]
        assert shop.events() == {"stored": 2, "renewed": 1}


async def test_saving_ends_when_its_time_is_up_or_the_store_is_full_or_away() -> None:
    async with spilling() as (shop, spill):
        wanted = names(*range(9))
        assert await spill.save(wanted, read, 10**9, time.monotonic() - 1) == 0
        shop.store.room = 2
        assert await spill.save(wanted, read, 10**9, time.monotonic() + 10) == 0
        assert len(shop.store.values) == 2
        shop.store.fails = True
        assert await spill.save(wanted, read, 10**9, time.monotonic() + 10) == 0
        assert await spill.save([], read, 10**9, time.monotonic() + 10) == 0


async def test_what_still_waits_is_written_at_the_end() -> None:
    shop = Shop()
    spill = Spill(shop.client, 100 * FORM.page_bytes)
    stored(shop, 3)
    spill.offer(pages(1, 2))
    spill.doubt([names(3)[0].hash])
    for at_the_end in (spill.delete_doubted, spill.flush):
        before = len(shop.store.calls)
        await at_the_end(time.monotonic() - 1)
        assert len(shop.store.calls) == before
        shop.store.fails = True
        await at_the_end(time.monotonic() + 10)
        assert len(shop.store.calls) == before + 1
        shop.store.fails = False
        await shop.client.until_allowed()
        await at_the_end(time.monotonic() + 10)
    assert shop.store.calls == ["drop", "drop", "renew", "renew", "put"]
    assert [*shop.store.values] == [name.hash for name in names(1, 2)]
    await shop.client.close()


async def test_the_store_is_tended() -> None:
    async with spilling() as (shop, spill):
        stored(shop, 1, 2)
        tending = asyncio.create_task(spill.tend())

        async def told() -> bool:
            return shop.count("store_pages") == 2

        await until(told, within_s=10)
        assert shop.count("store_bytes") == 2 * FORM.value_bytes
        tending.cancel()
        await asyncio.gather(tending, return_exceptions=True)
