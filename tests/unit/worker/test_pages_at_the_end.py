"""What a worker does with pages before it ends, and how long that takes at most."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from kvstore.page import names_of
from tests.unit.worker.engine_run import BS, engine_of, prompt_of, request, run
from tests.unit.worker.page_store import FORM, MemoryPages
from worker import pages as paging
from worker.config import PagesConfig
from worker.errors import StoppedError
from worker.page_metrics import PageMetrics
from worker.pages import Pages


class World:
    """An engine with two cached blocks, and a store that has their pages, or not."""

    def __init__(self) -> None:
        self.engine, _ = engine_of(16, paging=True)
        assert self.engine.paging is not None
        self.paging = self.engine.paging
        self.store = MemoryPages()
        self.pages = Pages(PagesConfig(), self.store, FORM, PageMetrics(CollectorRegistry()))
        self.pages.attach(self.engine, 16, lambda _: None, lambda: 10.0)
        prompt = prompt_of(2 * BS, 1)
        run(self.engine, request("a", [*prompt, 9], max_tokens=1))
        self.names = names_of(self.engine.root_of(""), tuple(prompt), BS)
        self.hashes = [name.hash for name in self.names]

    def fill(self) -> None:
        for name in self.names:
            self.store.values[name.hash] = FORM.encode(name, bytes(FORM.page_bytes))


async def test_what_is_in_doubt_is_deleted_also_of_steps_that_nobody_has_taken() -> None:
    world = World()
    world.fill()
    world.paging.doubted.add(world.hashes[1])
    await world.pages.forget()
    assert [*world.store.values] == world.hashes[:1]
    await world.pages.close()


async def test_a_store_that_hangs_holds_up_nobodys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORGET_S", "SAVE_S"):
        monkeypatch.setattr(paging, name, 0.1)
    world = World()
    world.paging.doubted.add(world.hashes[1])
    world.store.held.clear()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        async with asyncio.timeout(10):
            await world.pages.forget()
            await world.pages.save(thread)
    assert time.monotonic() - began < 2.5
    assert world.store.calls == ["drop", "renew"]
    await world.pages.close()


async def test_what_is_cached_is_saved() -> None:
    world = World()
    with ThreadPoolExecutor(1) as thread:
        await world.pages.save(thread)
    assert [*world.store.values] == world.hashes
    await world.pages.close()


@pytest.mark.parametrize("when", ["before", "between"])
async def test_a_step_that_does_not_come_back_is_told(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process would wait for its thread for ever; who gets this ends it without."""
    monkeypatch.setattr(paging, "SAVE_S", 0.2)
    world, step = World(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        if when == "before":
            thread.submit(step.wait)
        else:
            cached = world.paging.cached
            monkeypatch.setattr(world.paging, "cached", lambda: (thread.submit(step.wait), cached())[1])
        try:
            async with asyncio.timeout(10):
                with pytest.raises(StoppedError, match=r"a step has not come back in the 0\.2 s"):
                    await world.pages.save(thread)
        finally:
            step.set()
    assert not world.store.values
    await world.pages.close()
