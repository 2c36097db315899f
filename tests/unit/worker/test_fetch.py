"""Pages on their way in: what is looked for, what is taken, and how long a request waits for it."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvstore.page import PageFormat
from tests.unit.worker.engine_run import BS, request
from tests.unit.worker.fetch_world import PROMPT, World
from tests.unit.worker.page_store import FORM
from worker import fetch as fetching


async def test_what_the_pool_lacks_is_fetched_and_nothing_else() -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    await world.prepare()
    assert world.offered() == [0, 1, 2, 3, 4]
    assert world.shop.events() == {"fetched": 5, "adopted": 5}
    assert [ref.rank for ref in world.used] == [0, 1, 2, 3, 4]
    calls = list(world.shop.store.calls)
    assert calls == ["covered", "fetch"]
    await world.prepare()
    assert world.shop.store.calls == calls, "all is there"
    assert world.fetch.lacking(request("a", PROMPT)) == []
    # Of another prompt that begins alike, only the rest is looked for.
    longer = [*PROMPT[:-1], *range(40, 40 + BS)]
    assert world.fetch.lacking(request("b", longer)) == world.names_of(longer)[5:]


async def test_a_fault_of_ours_is_logged_with_whose_pages_it_was_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()

    async def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(world.fetch, "_prepare", broken)
    assert await world.prepare() == 0
    (line,) = caplog.records
    assert (line.getMessage(), line.__dict__["request_id"]) == ("fetching pages failed", "a")


async def test_the_first_hole_ends_the_prefix() -> None:
    world = World()
    world.store(0, 1, 3, 4)
    await world.prepare()
    assert world.offered() == [0, 1]
    assert world.shop.misses() == {"absent": 1}


async def test_a_page_that_vanishes_between_question_and_answer_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    covered = world.shop.store.covered

    async def covered_and_gone(*given: object) -> int:
        count = await covered(*given)  # type: ignore[arg-type]
        del world.shop.store.values[world.names[2].hash]
        return count

    monkeypatch.setattr(world.shop.store, "covered", covered_and_gone)
    await world.prepare()
    assert world.offered() == [0, 1]
    assert world.shop.misses() == {"absent": 1}


async def test_a_damaged_page_is_counted_and_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.page_client.FETCH_BYTES", 2 * FORM.value_bytes)
    world = World()
    world.store(0, 1, 2, 3, 4)
    wrong = world.names[3].hash
    world.shop.store.values[wrong] = world.shop.store.values[wrong][:-1] + b"?"
    await world.prepare()
    assert world.offered() == [0, 1, 2]
    assert world.shop.misses() == {"checksum": 1}
    assert wrong not in world.shop.store.values
    assert world.shop.store.calls == ["covered", "fetch", "fetch", "drop"]


async def test_a_page_that_makes_the_reader_fail_is_deleted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.store(0, 1, 2)
    read, wrong = PageFormat.read, world.names[1]

    def failing(form: PageFormat, value: bytes) -> object:
        name, payload = read(form, value)
        return (name, payload) if name != wrong else 1 // 0

    monkeypatch.setattr(PageFormat, "read", failing)
    await world.prepare()
    assert world.offered() == [0]
    assert world.shop.misses() == {"absent": 1, "not_a_page": 1}
    assert wrong.hash not in world.shop.store.values


async def test_prompts_that_are_scored_are_computed_and_tenants_do_not_meet() -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    await world.prepare(prompt_logprobs=1)
    assert world.shop.store.calls == []
    await world.prepare(salt="other")
    assert world.offered() == []
    assert world.shop.store.calls == ["covered"]


async def test_a_store_that_fails_is_left_alone_for_a_while() -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    world.shop.store.fails = True
    await world.prepare()
    await world.prepare()
    assert world.shop.misses() == {"unreachable": 2}
    assert world.shop.store.calls == ["covered"]
    assert world.offered() == []


async def test_a_store_that_is_too_slow_for_one_prompt_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs this prompt little, and the next one nothing."""
    monkeypatch.setattr(fetching, "LIMIT_S", 0.3)
    world = World()
    world.store(0, 1, 2, 3, 4)
    world.shop.store.held.clear()
    began = time.monotonic()
    await world.prepare()
    assert time.monotonic() - began < 5
    assert world.shop.misses() == {"late": 1}
    assert world.fetch.break_even.latency_s > 0.15
    world.shop.store.held.set()
    await world.prepare()
    assert world.shop.store.calls == ["covered", "covered", "fetch"]
    assert world.offered() == [0, 1, 2, 3, 4]


async def test_a_prompt_that_is_computed_sooner_than_the_store_answers_does_not_ask() -> None:
    """Also where nothing was fetched yet."""
    world = World(rate=200.0)
    world.store(0, 1, 2, 3, 4)
    world.fetch.break_even.late(0.1, time.monotonic())  # a prompt of 20 tokens takes as long
    await world.prepare()
    assert world.shop.store.calls == []


async def test_what_does_not_pay_is_not_asked_for() -> None:
    world = World(rate=1e9)
    world.store(0, 1, 2, 3, 4)
    world.fetch.break_even.fetched(1000, 1.0)
    world.fetch.break_even.asked(0.01, 0.0)
    await world.prepare()
    assert world.offered() == [0, 1, 2, 3, 4], "once, to find out"
    world.paging._pool.clear()
    await world.prepare()
    assert world.offered() == []
    assert world.shop.store.calls == ["covered", "fetch"]


async def test_a_store_that_is_too_slow_is_not_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its speed no more is known than that the time, in which the prompt would be computed, was not enough."""
    world = World(rate=40.0)
    world.store(0, 1, 2, 3, 4)
    covered = world.shop.store.covered

    async def covered_and_stuck(*given: object) -> int:
        count = await covered(*given)  # type: ignore[arg-type]
        world.shop.store.held.clear()
        return count

    monkeypatch.setattr(world.shop.store, "covered", covered_and_stuck)
    await world.prepare()
    assert world.offered() == []
    assert world.shop.misses() == {"late": 1}
    assert 0 < world.fetch.break_even.fetch_tok_s < 60
    world.shop.store.held.set()
    await world.shop.client.until_allowed(reads=True)
    world.fetch.break_even._probed = time.monotonic()  # it has been found out just now that it does not pay
    await world.prepare()
    assert world.shop.store.calls == ["covered", "fetch"]


async def test_equal_prompts_wait_for_one_fetch() -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    world.takes = False
    world.shop.store.held.clear()
    both = asyncio.gather(world.prepare(), world.prepare())
    await asyncio.sleep(0)
    world.shop.store.held.set()
    await both
    # The pages are on their way to the engine, which is what the second has waited for.
    assert [len(adoption.names) for adoption in world.posted] == [5]
    assert world.shop.store.calls == ["covered", "fetch"]
    assert world.fetch.lacking(request("a", PROMPT)) == []
    world.take()
    assert world.offered() == [0, 1, 2, 3, 4]


async def test_what_has_come_since_it_was_found_lacking_is_not_fetched_again() -> None:
    """A fetch may end in the turn of the event loop between the look and the begin of the next one."""
    world = World()
    world.store(0, 1, 2, 3, 4)
    world.takes = False
    lacking = world.fetch.lacking(request("a", PROMPT))
    await world.prepare()
    assert await world.fetch.prepare(lacking, "a") == 5 * BS  # it has come for both
    assert world.shop.store.calls == ["covered", "fetch"]
    world.take()
    await world.fetch.prepare(lacking, "a")
    assert world.shop.store.calls == ["covered", "fetch"]
    assert world.shop.events() == {"fetched": 5, "adopted": 5}


async def test_no_more_than_the_buffer_waits_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.page_client.FETCH_BYTES", FORM.value_bytes)
    world = World(buffer_pages=2)
    world.store(0, 1, 2, 3, 4)
    world.takes = False
    preparing = asyncio.create_task(world.prepare())
    async with asyncio.timeout(10):
        while len(world.posted) < 2:  # noqa: ASYNC110 - nobody tells of that
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert len(world.posted) == 2
    assert not preparing.done()
    world.takes = True
    world.take()
    await preparing
    assert world.offered() == [0, 1, 2, 3, 4]


async def test_a_request_that_waits_too_long_for_pages_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.page_client.FETCH_BYTES", FORM.value_bytes)
    monkeypatch.setattr(fetching, "LIMIT_S", 0.5)
    world = World(buffer_pages=2)
    world.store(0, 1, 2, 3, 4)
    world.takes = False
    await world.prepare()
    assert len(world.posted) == 2
    assert world.shop.misses() == {"late": 1}
    assert world.fetch.break_even.fetch_tok_s > 60  # waiting for the engine is not fetching: that would be 24
    world.take()
    assert world.offered() == [0, 1]


async def test_what_is_in_doubt_is_not_fetched_until_it_is_deleted() -> None:
    world = World()
    world.store(0, 1, 2, 3, 4)
    doubted = [name.hash for name in world.names[2:]]
    world.paging.doubted.update(doubted)
    await world.prepare()
    assert world.offered() == [0, 1]
    assert world.fetch.lacking(request("a", PROMPT)) == []
    world.fetch.doubts.deleted(doubted)
    await world.prepare()
    assert world.offered() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("posted", [False, True])
async def test_what_was_fetched_before_a_doubt_is_not_taken_in_after_it(
    *, posted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while it is read from the store, nor on its way to the engine; deleted it may be by then."""
    world = World()
    world.store(0, 1, 2, 3, 4)
    world.takes = False
    fetch, fetched, go_on = world.shop.store.fetch, asyncio.Event(), asyncio.Event()

    async def fetch_and_wait(*given: object) -> list[bytes]:
        values = await fetch(*given)  # type: ignore[arg-type]
        fetched.set()
        await go_on.wait()
        return values

    monkeypatch.setattr(world.shop.store, "fetch", fetch_and_wait)
    preparing = asyncio.create_task(world.prepare())
    await fetched.wait()
    if posted:
        go_on.set()
        await preparing
    doubted = {name.hash for name in world.names[2:]}
    world.paging.doubted.update(doubted)
    world.fetch.doubts.deleted([*doubted])
    assert world.paging.doubted == doubted
    go_on.set()
    await preparing
    world.take()
    assert world.offered() == [0, 1]
    assert world.paging.doubted == set(), "nothing is left of them"
