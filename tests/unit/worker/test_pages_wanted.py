"""From a page that is evicted to the head that the store lacks: the parts of a worker's pages put together, with the
engine's thread."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvstore.page import names_of
from tests.support.waiting import until
from tests.unit.worker.engine_run import BS, engine_of, prompt_of, request
from tests.unit.worker.page_store import FORM, MemoryPages
from worker.config import PagesConfig
from worker.page_metrics import PageMetrics
from worker.pages import Pages
from worker.stepper import Stepped, Stepper

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvstore.block_hash import BlockHash


class World:
    """A worker's engine, in a thread that goes on by itself, and its pages."""

    def __init__(self, blocks: int) -> None:
        self.engine, _ = engine_of(blocks, paging=True)
        self.store = MemoryPages()
        self.pages = Pages(PagesConfig(), self.store, FORM, PageMetrics(CollectorRegistry()))
        self.stepper = Stepper(self.engine, self._take, self.pages.leave)
        self.pages.attach(self.engine, blocks, self.stepper.adopt, lambda: 10.0)
        self.idle = asyncio.Event()

    def _take(self, stepped: Stepped) -> None:
        self.stepper.taken()
        if stepped.output is not None:
            self.pages.took(stepped.output)
        else:
            self.idle.set()

    async def run(self, name: str, prompt: Sequence[int]) -> None:
        """To its end: the engine has nothing to do after it."""
        self.idle.clear()
        self.stepper.add(request(name, prompt, max_tokens=1))
        await self.idle.wait()

    def hashes(self, prompt: Sequence[int]) -> list[BlockHash]:
        return [name.hash for name in names_of(self.engine.root_of(""), tuple(prompt), BS)]

    async def stores(self, hashes: Sequence[BlockHash]) -> None:
        async def all_there() -> bool:
            return {*hashes} <= {*self.store.values}

        await until(all_there, within_s=10)


@asynccontextmanager
async def running(blocks: int) -> AsyncIterator[World]:
    world = World(blocks)
    thread = asyncio.get_running_loop().run_in_executor(None, world.stepper.run, asyncio.get_running_loop())
    parts = [asyncio.create_task(part) for part in world.pages.parts(busy=lambda: True).values()]
    try:
        async with asyncio.timeout(20):
            yield world
    finally:
        world.stepper.close()
        for part in parts:
            part.cancel()
        await asyncio.gather(thread, *parts, return_exceptions=True)
        await world.pages.close()


async def test_a_head_that_never_leaves_the_pool_gets_to_the_store_with_its_tails() -> None:
    """Also when the worker has nothing to do by then."""
    async with running(blocks=8) as world:
        head, tail = prompt_of(2 * BS, 1), prompt_of(BS, 2)
        for name, prompt in (("a", [*head, *tail]), ("b", [*head, 9]), ("c", prompt_of(6 * BS, 3))):
            await world.run(name, prompt)
        await world.stores(world.hashes([*head, *tail]))
        assert world.pages.leave() == 64, "nothing is left over"
        for hash_ in world.hashes(head):
            assert world.engine.paging is not None
            assert world.engine.paging.offers(hash_)
        value = world.store.values[world.hashes(head)[1]]
        assert FORM.read(value)[0].tokens == tuple(head[BS:])


async def test_the_pages_of_a_pool_know_who_waits_for_it() -> None:
    async with running(blocks=8) as world:
        assert world.engine.paging is not None
        assert world.engine.paging.waiting is world.engine.waiting
