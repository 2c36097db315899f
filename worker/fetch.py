"""Pages on their way in: before a request gets to the engine, and while there is nothing else to do.

    claim ─▶ what the pool lacks ─▶ covered? ─▶ fetch ─▶ check, in a thread ─▶ adopt ─▶ add the request
             from the first hole on             some MB at a time              engine's thread, in this order

The first page that is missing, or is not what it should be, ends a prefix; the rest is computed. A fetch takes no
longer than computing all that is lacking would, as far as is known, or 0.1 s if that is longer. A store that was too
slow for that is known to be slow; it counts as broken only when a call takes CALL_S.
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from kvstore.logs import about
from kvstore.page import names_of
from kvstore.page_store import PageRef
from worker.break_even import BreakEven
from worker.doubts import Doubts
from worker.page_metrics import ABSENT, LATE, UNREACHABLE
from worker.page_reader import Pages, Reader
from worker.stepper import Adoption

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.block_hash import BlockHash
    from kvstore.page import PageName
    from worker.engine import Engine
    from worker.page_client import PageClient
    from worker.paging import Paging
    from worker.sequence import Request

logger = logging.getLogger(__name__)

LIMIT_S: Final = 2.0
"""A request waits no longer for pages."""
LEAST_LIMIT_S: Final = 0.1
ASKING_SHARE: Final = 0.5
"""Of that, for the answer what is there."""
FETCHES: Final = 4
"""Requests that are fetched for at once; others wait for their turn, no longer than for pages."""
LOOK_S: Final = 0.2
"""How often a busy worker that would fetch the hottest pages looks whether it is idle."""
LOG_S: Final = 60.0
"""How often the break-even line is logged while there are fetches."""


class Coming:
    """A fetch that others wait for, as they want the same pages."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.handed: set[BlockHash] = set()
        """Prefixes whose pages are on their way to the engine, or taken in."""


class Fetch:
    """Brings pages from the store to the pool."""

    def __init__(
        self,
        client: PageClient,
        engine: Engine,
        paging: Paging,
        adopt: Callable[[Adoption], object],
        used: Callable[[Sequence[PageRef]], None],
        prefill_tok_s: Callable[[], float],
        buffer_bytes: int,
    ) -> None:
        """``adopt`` hands pages to the engine's thread, which has at most ``buffer_bytes`` of them to take at a time.
        ``used`` is told which pages were of use. ``prefill_tok_s`` tells how fast this worker computes prompts."""
        self._client = client
        self._reader = Reader(client)
        self._engine = engine
        self._paging = paging
        self._adopt = adopt
        self._used = used
        self._prefill_tok_s = prefill_tok_s
        self.break_even = BreakEven()
        self._turns = asyncio.Semaphore(FETCHES)
        self._room = max(buffer_bytes // client.form.page_bytes, 1)
        """Pages that may still be on their way to the engine."""
        self._made_room = asyncio.Event()
        self._coming: dict[BlockHash, Coming] = {}
        """Pages that are looked for: by which fetch."""
        self._posted: set[BlockHash] = set()
        """Pages on their way to the engine."""
        self.doubts = Doubts(paging)
        self._logged = float("-inf")

    def lacking(self, request: Request) -> list[PageName]:
        """Blocks of the prompt that the pool lacks, from the first one on; none if it could not use them."""
        if request.prompt_logprobs is not None:  # what is scored must be computed
            return []
        root = self._engine.root_of(request.salt, request.tenant)
        return self._lacking(names_of(root, request.prompt, self._client.form.block_size))

    async def prepare(self, names: list[PageName], request_id: str) -> int:
        """Has pages of what a prompt is ``lacking`` on their way to the engine when it returns, if that is worth it.
        Raises nothing but CancelledError. ``request_id``: whose prompt it is.

        Returns how many tokens they hold, by whichever fetch they came. The engine has not taken all of them yet, and
        nobody waits for that: it may still refuse some, if what they continue had to go.
        """
        rate, own = self._prefill_tok_s(), Coming()
        tokens, now = len(names) * self._client.form.block_size, time.monotonic()
        if not names or not self.break_even.worth_a_look(tokens, rate, now):
            return 0
        limit = min(max(tokens / rate, LEAST_LIMIT_S), LIMIT_S)
        try:
            async with asyncio.timeout(limit):
                await self._prepare(names, now + limit, own)
        except TimeoutError:
            self._client.metrics.miss(LATE)
        except Exception:
            logger.exception("fetching pages failed", extra=about(request_id))
        return len(own.handed) * self._client.form.block_size

    async def fetch_hottest(self, most: int, busy: Callable[[], bool], until: float) -> int:
        """Fills free blocks of the pool with what the fleet used last, while the worker isn't ``busy``.

        Returns how many pages were handed on. At most ``most`` are looked at, and none after ``until``.
        """
        client, handed = self._client, 0
        hashes = (
            await client.call(lambda: client.store.hottest(client.form.fingerprint, most), reads=True) if most else []
        )
        for start in range(0, len(hashes or []), client.at_once):
            while busy() and time.monotonic() < until:  # noqa: ASYNC110 - nobody tells of that
                await asyncio.sleep(LOOK_S)
            if time.monotonic() >= until:
                break
            some = (hashes or [])[start : start + client.at_once]
            handed += await self._fetch_some([each for each in some if not self._expected(each)], until)
        return handed

    async def _fetch_some(self, hashes: list[BlockHash], until: float) -> int:
        """How many of these pages were handed on. Requests that lack one wait for it."""
        if not hashes:
            return 0
        own = Coming()
        self._coming |= dict.fromkeys(hashes, own)
        try:
            with self.doubts.held():
                pages = await self._reader.values(hashes, None, until)
                for run in _runs(pages or []):
                    first, _ = run[0]
                    if not first.position or self._paging.offers(first.parent) or first.parent in self._posted:
                        await self._hand_over(run, own.handed, evict=False)
        finally:
            for hash_ in hashes:
                del self._coming[hash_]
            own.done.set()
        return len(own.handed)

    def _expected(self, hash_: BlockHash) -> bool:
        """Whether a page is in the pool, or on its way there."""
        return self._paging.offers(hash_) or hash_ in self._posted or hash_ in self._coming

    def _lacking(self, names: list[PageName]) -> list[PageName]:
        for index, name in enumerate(names):
            if not self._paging.offers(name.hash) and name.hash not in self._posted:
                return list(takewhile(lambda name: name.hash not in self._paging.doubted, names[index:]))
        return []

    async def _prepare(self, names: list[PageName], until: float, own: Coming) -> None:
        # They were looked up in an earlier turn of the event loop: a fetch may have ended in between.
        own.handed |= self._posted.intersection(name.hash for name in names)
        while (names := self._lacking(names)) and (coming := self._coming.get(names[0].hash)) is not None:
            await coming.done.wait()  # another request has the same prefix
            own.handed |= coming.handed.intersection(name.hash for name in names)
        if not names:
            return
        mine = [name.hash for name in names if name.hash not in self._coming]
        self._coming |= dict.fromkeys(mine, own)
        try:
            async with self._turns:
                await self._fetch(names, until, own)
        finally:
            for hash_ in mine:
                del self._coming[hash_]
            own.done.set()

    async def _fetch(self, names: list[PageName], until: float, own: Coming) -> None:
        client, metrics, size = self._client, self._client.metrics, self._client.form.block_size
        hashes = [name.hash for name in names]
        began = time.monotonic()
        limit = (until - began) * ASKING_SHARE
        covered = await client.call(
            lambda: client.store.covered(client.form.fingerprint, hashes), limit_s=limit, reads=True
        )
        now = time.monotonic()
        if covered is None and now - began >= limit:
            self.break_even.late(limit, now)
            metrics.miss(LATE)
            return
        if covered is None:
            metrics.miss(UNREACHABLE)
            return
        self.break_even.asked(now - began, now)
        if covered < len(names):
            metrics.miss(ABSENT)
        names = names[: self.break_even.most(covered * size, self._prefill_tok_s(), now) // size] if covered else []
        if names:
            with self.doubts.held():
                await self._bring(names, until, own)

    async def _bring(self, names: list[PageName], until: float, own: Coming) -> None:
        """Fetches, checks and hands over, some at a time, until something is missing or time is up."""
        client = self._client
        size, began = client.form.block_size, time.monotonic()
        found, waited = 0, 0.0
        try:
            while found < len(names):
                some = names[found : found + client.at_once]
                pages = await self._reader.values([name.hash for name in some], some, until)
                if pages:
                    found += len(pages)
                    handing = time.monotonic()
                    try:
                        await self._hand_over(pages, own.handed, evict=True)
                    finally:  # what the engine takes is not the store's time
                        waited += time.monotonic() - handing
                if pages is None or len(pages) < len(some):
                    break
        finally:
            # Also when time was up: if it was not enough for the first of them, that is learnt too.
            late = time.monotonic() >= until
            counted = found or (min(client.at_once, len(names)) if late else 0)
            self.break_even.fetched(counted * size, time.monotonic() - began - waited)
        self._used([PageRef(name.hash, name.position) for name in names[:found]])
        self._tell()

    async def _hand_over(self, pages: Pages, handed: set[BlockHash], *, evict: bool) -> None:
        """To the engine's thread, once it has room for them. ``handed`` has those that it did not refuse."""
        while self._room < len(pages) and self._posted:
            self._made_room.clear()
            await self._made_room.wait()
        names, hashes = [name for name, _ in pages], [name.hash for name, _ in pages]
        self._room -= len(pages)
        self._posted.update(hashes)
        handed.update(hashes)
        self.doubts.hold()

        def taken(count: int) -> None:
            self._client.metrics.pages("adopted", count)
            self._posted.difference_update(hashes)
            handed.difference_update(hashes[count:])
            self._room += len(hashes)
            self._made_room.set()
            self.doubts.release()

        self._adopt(Adoption(names, [payload for _, payload in pages], evict, taken))

    def _tell(self) -> None:
        rate = self._prefill_tok_s()
        self._client.metrics.fetch_tok_s.set(self.break_even.fetch_tok_s)
        self._client.metrics.least_tokens.set(self.break_even.tokens(rate))
        if time.monotonic() - self._logged >= LOG_S:
            self._logged = time.monotonic()
            logger.info("%s", self.break_even.described(rate))


def _runs(pages: Pages) -> list[Pages]:
    """Pages of several prefixes as runs that go on, each from the page before it."""
    runs: list[Pages] = []
    for name, payload in pages:
        if runs and runs[-1][-1][0].hash == name.parent:
            runs[-1].append((name, payload))
        else:
            runs.append([(name, payload)])
    return runs
