"""What a worker has to do with pages outside of its pool: the parts, and what the loop calls of them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.page_dir import DirPages, require_folder
from kvstore.page_redis import RedisPages
from kvstore.page_store import PageLimits
from worker.errors import StoppedError
from worker.fetch import Fetch
from worker.page_client import PageClient
from worker.spill import Spill
from worker.stepper import Adoption

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Executor

    from kvstore.block_hash import BlockHash
    from kvstore.page import PageFormat, PageName
    from kvstore.page_store import PageStore
    from worker.config import PagesConfig
    from worker.engine import Engine
    from worker.heads import Place
    from worker.page_metrics import PageMetrics
    from worker.sequence import Request
    from worker.step import Spilled, StepOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_S: Final = 5.0
"""How long a worker that ends may take to store what its pool has cached, or wait for a step that is under way."""
FORGET_S: Final = 2.0
"""And to delete what is in doubt, before that."""
WARM_S: Final = 60.0
"""After so long a new worker does not fetch the hottest pages any more."""
WARM_SHARE: Final = 0.25
"""Of the pool, at most, is filled with these."""


def open_store(config: PagesConfig, namespace: str) -> PageStore:
    """The store that was asked for. Connects later. Raises BrokerUrl for what is no URL of a server, PageFolderError
    for a folder that can't be made."""
    limits = PageLimits(config.budget, config.ttl)
    if config.folder:
        return DirPages(require_folder(config.folder), limits)
    return RedisPages(config.redis, namespace, limits)


class Pages:
    """Made for one worker, before its loop; ``attach`` comes before all else."""

    def __init__(self, config: PagesConfig, store: PageStore, form: PageFormat, metrics: PageMetrics) -> None:
        self._config = config
        self._client = PageClient(store, form, metrics)
        self._metrics = metrics
        self._spill = Spill(self._client, config.buffer, self._deleted, self._want)
        self._fetch: Fetch | None = None
        self._passed_over = 0
        self._blocks = 0

    def attach(
        self, engine: Engine, blocks: int, adopt: Callable[[Adoption], object], prefill_tok_s: Callable[[], float]
    ) -> None:
        """``blocks``: of the pool. ``adopt`` hands pages to the engine's thread; ``prefill_tok_s`` tells how fast
        prompts are computed now."""
        assert engine.paging is not None
        self._paging = engine.paging
        self._paging.waiting = engine.waiting
        self._adopt = adopt
        self._blocks = blocks
        self._fetch = Fetch(
            self._client, engine, engine.paging, adopt, self._spill.used, prefill_tok_s, self._config.buffer
        )

    @property
    def fetch_tok_s(self) -> float:
        """Tokens that a second of fetching brings; 0: nothing was fetched yet."""
        return self._fetch.break_even.fetch_tok_s if self._fetch is not None else 0.0

    def leave(self) -> int:
        """How many evicted blocks the engine may read now."""
        return self._spill.leave(self._paging.rescued)

    def _deleted(self, doubted: Sequence[BlockHash]) -> None:
        if self._fetch is not None:
            self._fetch.doubts.deleted(doubted)

    def _want(self, places: Sequence[Place]) -> None:
        """The engine's thread reads them between steps, when it is given something to take in: here nothing."""
        self._paging.want(places)
        self._adopt(Adoption((), (), evict=False, taken=lambda _: self._spill.wanted(self._paging.take_wanted())))

    def parts(self, busy: Callable[[], bool]) -> dict[str, Coroutine[None, None, None]]:
        """What runs beside the loop, by name; none ever returns. ``busy``: whether there are jobs."""
        return {"spill": self._spill.run(), "pages": self._spill.tend(), "warm": self._warm(busy)}

    async def _warm(self, busy: Callable[[], bool]) -> None:
        """Fills a part of the empty pool with what the fleet used last, while the worker isn't ``busy``."""
        assert self._fetch is not None
        most = int(self._blocks * WARM_SHARE)
        try:
            handed = await self._fetch.fetch_hottest(most, busy, time.monotonic() + WARM_S)
        except Exception:  # a fault of ours: the worker serves without them
            logger.exception("fetching the hottest pages failed")
        else:
            logger.info("pages: %d of the fleet's hottest blocks were fetched", handed)
        await asyncio.Event().wait()

    def took(self, output: StepOutput) -> None:
        """A step's results: what left the pool is to be stored, and so is what it continues."""
        self._spill.continued(self._paging.take_heads())
        self._spill.offer(output.spilled)
        if output.doubted:
            self._spill.doubt(output.doubted)
        passed_over, self._passed_over = self._passed_over, self._paging.passed_over
        self._spill.passed_over(self._passed_over - passed_over)

    def lacking(self, request: Request) -> list[PageName]:
        """Blocks of a prompt that ``prepare`` may bring."""
        return [] if self._fetch is None else self._fetch.lacking(request)

    async def prepare(self, names: list[PageName], request_id: str) -> int:
        """Fetches what the pool is lacking, if that is worth it. Returns how many tokens have come: they are on their
        way to the engine, or taken in. It may still refuse some, so no more than the prompt's hits are of use."""
        assert self._fetch is not None
        return await self._fetch.prepare(names, request_id)

    async def forget(self) -> None:
        """Deletes what is in doubt still, before the worker ends, however it does."""
        self._spill.doubt([*self._paging.doubted])  # also that of steps which nobody has taken
        try:
            async with asyncio.timeout(FORGET_S):
                await self._spill.delete_doubted(time.monotonic() + FORGET_S)
        except TimeoutError:
            logger.warning("pages in doubt could not be deleted in %.1f s", FORGET_S)

    async def save(self, engines_thread: Executor) -> None:
        """Stores what the pool has cached, before the worker ends: when no step begins any more.

        Raises StoppedError when a step that is under way has not come back by then: a process that ends waits for its
        threads, and for that one maybe for ever."""
        began, engine = time.monotonic(), Between(engines_thread)
        try:
            async with asyncio.timeout(SAVE_S):
                saved, cached = await self._save(engine, began + SAVE_S)
        except TimeoutError:
            if engine.asked:
                raise StoppedError(f"a step has not come back in the {SAVE_S:g} s of a worker's end") from None
            logger.warning("pages: what is cached could not be stored in %.1f s", SAVE_S)
        except Exception:  # a fault of ours: the worker ends as it would without pages
            logger.exception("storing the cached pages failed")
        else:
            logger.info("pages: %d of %d cached blocks are stored, in %.1f s", saved, cached, time.monotonic() - began)

    async def _save(self, engine: Between, until: float) -> tuple[int, int]:
        """How many are stored, of how many."""
        names = await engine.do(self._paging.cached)

        async def read(some: Sequence[PageName]) -> list[Spilled]:
            return await engine.do(lambda: self._paging.read(some))

        saved = await self._spill.save(names, read, self._config.budget, until)
        await self._spill.flush(until)
        return saved, len(names)

    async def close(self) -> None:
        """The store is not used any more."""
        await self._client.close()


class Between:
    """The engine's thread, when it has no step to do."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self.asked = False
        """Whether it has not answered yet."""

    async def do(self, what: Callable[[], T]) -> T:
        """In that thread, after a step that is under way."""
        self.asked = True
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, what)
        self.asked = False
        return answer
