"""Pages on their way out: what the pool gives up goes to the store, behind the steps' back.

    engine's thread ──Spilled──▶ buffer ──▶ encode, in a thread ──▶ store
                                 bounded: what finds no room is not even read

A page that is in the store already is renewed, not written again; so is what it continues (``worker.heads``), which the
pool is asked for where the store lacks it. What is in doubt is deleted before anything else is written; of what waits,
pages that are in doubt are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstore.page_store import RANK_MS, PageRef, StoredPage
from worker.heads import Heads
from worker.page_client import CALL_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from kvstore.block_hash import BlockHash
    from kvstore.page import PageName
    from worker.heads import Place
    from worker.page_client import PageClient
    from worker.step import Spilled

logger = logging.getLogger(__name__)

MOST_A_STEP: Final = 64
"""Blocks that are read beside one step, at most: it waits for that."""
MOST_USED: Final = 8192
"""Pages that wait to be counted as used, at most."""
MOST_RENEWED: Final = 512
"""Of these, or of heads, in one call."""
TEND_S: Final = 5.0
"""How often the store is tended."""


class Spill:
    """Takes pages from the event loop, and writes them when it comes to it."""

    def __init__(
        self,
        client: PageClient,
        buffer_bytes: int,
        deleted: Callable[[Sequence[BlockHash]], object] = lambda _: None,
        want: Callable[[Sequence[Place]], object] = lambda _: None,
    ) -> None:
        """``buffer_bytes``: of pages that wait, but one always may; those being written count too, and those that the
        engine's thread has read and not told of yet. ``deleted`` is told which doubted prefixes have no page any more;
        ``want``, which blocks the store lacks: ``wanted`` answers it."""
        self._client = client
        self._deleted = deleted
        self._want = want
        self._heads = Heads()
        self._wanting = False
        """Whether an answer to ``want`` is still to come."""
        self._most = max(buffer_bytes // client.form.page_bytes, 1)
        self._waiting: deque[Spilled] = deque()
        self._doubts: deque[BlockHash] = deque()
        """Prefixes whose pages are to be deleted."""
        self._pages = 0
        """That wait or are being written."""
        self._offered = 0
        """So far, taken or not."""
        self._used: deque[PageRef] = deque(maxlen=MOST_USED)
        self._news = asyncio.Event()

    def leave(self, read: int) -> int:
        """How many evicted blocks may be read now. For the engine's thread, which has ``read`` so many so far."""
        untold = read - self._offered  # before the pages: what is taken meanwhile counts twice rather than never
        return min(max(self._most - self._pages - untold, 0), MOST_A_STEP)

    def offer(self, pages: Iterable[Spilled]) -> None:
        """Takes what has room."""
        for page in pages:
            if self._pages < self._most:
                self._pages += 1
                self._waiting.append(page)
            else:
                self.passed_over(1)
            self._offered += 1
        self._told()

    def passed_over(self, count: int) -> None:
        """Blocks were evicted and not read."""
        self._client.metrics.pages("dropped", count)

    def doubt(self, hashes: Iterable[BlockHash]) -> None:
        """What these prefixes' blocks hold is in doubt: whatever is stored of them goes."""
        self._doubts.extend(hashes)
        self._keep([self._waiting.popleft() for _ in range(len(self._waiting))])
        self._told()

    def used(self, refs: Sequence[PageRef]) -> None:
        """These were fetched: they count as used, when it comes to it. The oldest are forgotten when there are many."""
        self._used.extend(refs)
        self._told()

    def continued(self, chains: Iterable[Sequence[BlockHash]]) -> None:
        """Pages that were used continue these: the hashes of all blocks before them, from the first one on."""
        self._heads.continued(chains, time.monotonic())
        self._told()

    def wanted(self, pages: Sequence[Spilled]) -> None:
        """What was wanted, as far as it is offered still and could be read."""
        self._wanting = False
        self._client.metrics.pages("heads", len(pages))
        self.offer(pages)
        self._ask()

    async def run(self) -> None:
        """Writes what waits. Never returns."""
        while True:
            await self._news.wait()
            while self._anything:
                await self._client.until_allowed()
                if self._doubts:
                    await self._delete_some()
                    continue
                await self._renew_used()
                if self._waiting or self._heads:
                    await self._write_some()
                self._ask()
            self._news.clear()

    async def tend(self) -> None:
        """Keeps the store within its bounds, and tells its size. Never returns."""
        metrics = self._client.metrics
        while True:
            usage = await self._client.call(self._client.store.tend)
            if usage is not None:
                metrics.stored.set(usage.pages)
                metrics.stored_bytes.set(usage.bytes)
            await asyncio.sleep(TEND_S)

    async def save(
        self,
        names: Sequence[PageName],
        read: Callable[[Sequence[PageName]], Awaitable[Sequence[Spilled]]],
        most_bytes: int,
        until: float,
    ) -> int:
        """Stores what the pool has cached, hottest first, before the process ends. Returns how many pages are stored.

        ``read`` gets pages from the pool. No more than ``most_bytes`` are stored, or the last would push out the first;
        and none after ``until`` on the monotonic clock, or once the store can't be used.
        """
        names = names[: most_bytes // self._client.form.value_bytes]
        count, saved, began = self._client.at_once, 0, time.monotonic()
        for start in range(0, len(names), count):
            # They are used together, however long it takes: what is stored last must not count as used last.
            first = start + int((time.monotonic() - began) * 1000 / RANK_MS)
            some = {PageRef(name.hash, first + rank): name for rank, name in enumerate(names[start : start + count])}
            missing = await self._missing(list(some))
            if missing is None:
                break
            pages = await read([some[ref] for ref in missing])
            refs = {name.hash: ref for ref, name in some.items()}
            left = until - time.monotonic()
            if left <= 0 or not await self._put([(refs[page.name.hash], page) for page in pages], left):
                break
            saved += len(some) - len(missing) + len(pages)
        return saved

    async def delete_doubted(self, until: float) -> None:
        """Deletes what is in doubt, when ``run`` does not any more; none after ``until``, or a failure."""
        while self._doubts and time.monotonic() < until and await self._delete_some():
            pass

    async def flush(self, until: float) -> None:
        """Writes what waits, likewise."""
        left = len(self._waiting)
        while self._waiting and time.monotonic() < until:
            await self._write_some()
            left, before = len(self._waiting), left
            if left == before:
                break

    async def _write_some(self) -> None:
        """The next of what waits, as much as goes into one call. What can't be asked about stays, also when this is
        cancelled."""
        pages = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._client.at_once))]
        heads, done = self._heads.take(MOST_RENEWED), False
        try:
            done = await self._store(pages, heads)
        except Exception:  # a fault of ours: it costs these pages, and no request
            logger.exception("storing pages failed")
            self._client.metrics.pages("dropped", len(pages))
            done = True
        finally:
            if done:
                self._pages -= len(pages)
            else:
                self._keep(pages)
                self._heads.failed(heads)
            self._gauge()

    def _keep(self, pages: Sequence[Spilled]) -> None:
        """These go on waiting, before all others, unless they are in doubt by now."""
        doubts = {*self._doubts}
        kept = [page for page in pages if page.name.hash not in doubts]
        self._waiting.extendleft(reversed(kept))
        self._pages -= len(pages) - len(kept)
        self.passed_over(len(pages) - len(kept))

    async def _renew_used(self) -> None:
        refs = [self._used.popleft() for _ in range(min(len(self._used), MOST_RENEWED))]
        if refs:
            await self._client.call(lambda: self._client.store.renew(self._client.form.fingerprint, refs))

    async def _delete_some(self) -> bool:
        """Whether the next of what is in doubt is deleted. What isn't stays, also when this is cancelled."""
        client, doubted = self._client, list(islice(self._doubts, self._client.at_once))

        async def drop() -> bool:
            await client.store.drop(client.form.fingerprint, doubted)
            return True

        if not await client.call(drop):
            return False
        for _ in doubted:
            self._doubts.popleft()
        client.metrics.pages("doubted", len(doubted))
        self._deleted(doubted)
        return True

    def _ask(self) -> None:
        """For heads that the store lacks, as many as there is room for."""
        if not self._wanting:
            lacking = self._heads.lacking(min(self._most - self._pages, MOST_A_STEP))
            if lacking:
                self._wanting = True
                self._want(lacking)

    async def _store(self, pages: list[Spilled], heads: Sequence[PageRef]) -> bool:
        """Whether it is done with, in whatever way: pages that the store fails on are not tried again. What they
        continue is renewed with them."""
        refs = {PageRef(page.name.hash, page.name.position): page for page in pages}
        missing = await self._missing([*refs], heads)
        if missing:
            await self._put([(ref, refs[ref]) for ref in missing])
        return missing is not None

    async def _missing(self, refs: Sequence[PageRef], heads: Sequence[PageRef] = ()) -> list[PageRef] | None:
        """Those that are not in the store; the others count as used, and so do heads. None: the store can't be
        asked."""
        client, began, asked = self._client, time.monotonic(), [*refs, *heads]
        there = await client.call(lambda: client.store.renew(client.form.fingerprint, asked)) if asked else []
        if there is None:
            return None
        there, heads_there = there[: len(refs)], there[len(refs) :]
        self._heads.renewed(heads, heads_there, began)
        client.metrics.pages("renewed", sum(there))
        return [ref for ref, is_there in zip(refs, there, strict=True) if not is_there]

    async def _put(self, pages: Sequence[tuple[PageRef, Spilled]], limit_s: float | None = None) -> bool:
        """Whether the store took them all."""
        client, encode = self._client, self._client.form.encode
        values = await client.beside(lambda: [StoredPage(ref, encode(page.name, page.payload)) for ref, page in pages])
        taken = await client.call(
            lambda: client.store.put(client.form.fingerprint, values), limit_s=CALL_S if limit_s is None else limit_s
        )
        if taken is None:
            client.metrics.pages("dropped", len(pages))
            return False
        client.metrics.pages("stored", sum(taken))
        client.metrics.pages("refused", len(taken) - sum(taken))
        client.metrics.moved("out", sum(taken) * client.form.value_bytes)
        return all(taken)

    @property
    def _anything(self) -> bool:
        return bool(self._doubts or self._waiting or self._used or self._heads)

    def _told(self) -> None:
        self._gauge()
        if self._anything:
            self._news.set()

    def _gauge(self) -> None:
        self._client.metrics.buffer.set(self._pages * self._client.form.page_bytes)
