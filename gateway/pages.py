"""What the page store has of a prompt beyond what workers hold: asked only where a worker would fetch it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.errors import KvError
from kvstore.loop_time import loop_timeout
from kvstore.outage import Outage
from kvstore.page_store import TTL_S, PageLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gateway.prefixes import PromptHashes
    from kvstore.block_hash import BlockHash
    from kvstore.page_store import PageStore
    from kvstore.registry import WorkerInfo

logger = logging.getLogger(__name__)

LIMIT_S: Final = 0.1
"""How long the store may take. Without it a job is only placed worse, but it must not wait."""
ALONE_S: Final = 5.0
"""After an error the store is left alone for so long."""
SLOW_S: Final = 0.5
"""And so long when it did not answer in time: it may have been busy for once, but a crowd must not wait for it."""
MOST_QUESTIONS: Final = 4
"""One for each place where some worker's part of the prompt ends; of more, those of the workers that hold most."""
MOST_BLOCKS: Final = 4096
"""That one question asks for; a store that has all of them is not asked for more."""
AT_A_TIME: Final = 4
"""Questions that are under way together: as many as a store has connections. What waits for its turn here does not
wait for the store."""


class PlaceError(OSError):
    """Pages can't be where they are said to be; the message says which option to change."""


def open_store(pages: str, pages_redis: str, broker: str, namespace: str, ttl_s: float = TTL_S) -> PageStore | None:
    """The store that workers with the same settings use, to read; None: none. Connects when it is first used.

    Raises PlaceError for what is no place.
    """
    limits = PageLimits(0, ttl_s)  # who only reads has no budget
    kind, _, path = pages.partition(":")
    if kind == "dir" and path:
        if pages_redis:
            raise PlaceError(f"pages can't be both in {pages} and in a server: leave out --pages or --pages-redis")
        from kvstore.page_dir import DirPages

        return DirPages(Path(path).expanduser(), limits, readonly=True)
    if pages not in ("none", "redis"):
        raise PlaceError(f"--pages {pages} is not none, redis or dir:PATH")
    if pages == "none" and not pages_redis:
        return None
    from kvstore.page_redis import RedisPages

    return RedisPages(pages_redis or broker, namespace, limits)


class Stored:
    """Asks the store. What goes wrong there ends here."""

    def __init__(
        self, store: PageStore, *, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._limit_s = limit_s
        self._clock = clock
        self._outage = Outage(logger, "asking the store of pages")
        self._again = -math.inf
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def look(
        self, workers: Sequence[WorkerInfo], hashes: PromptHashes, held: Mapping[str, int]
    ) -> dict[str, int]:
        """By worker id, how many of the prompt's blocks follow in the store on those that it holds, for workers that
        fetch faster than they compute. `held`: blocks by worker id."""
        questions: defaultdict[tuple[str, int, int], list[WorkerInfo]] = defaultdict(list)
        for each in workers:
            if each.fetch_tok_s > each.prefill_tok_s > 0 and held[each.id] < len(hashes.of(each)):
                questions[each.fingerprint, each.block_size, held[each.id]].append(each)
        if not questions or self._clock() < self._again:
            return {}
        asked = sorted(questions, key=lambda question: question[2], reverse=True)[:MOST_QUESTIONS]
        chains = [hashes.of(questions[each][0])[each[2] : each[2] + MOST_BLOCKS] for each in asked]
        found = await asyncio.gather(*(map(self._covered, asked, chains)))
        return {each.id: blocks for question, blocks in zip(asked, found, strict=True) for each in questions[question]}

    async def close(self) -> None:
        """The store is not used any more."""
        await self._store.close()

    async def _covered(self, question: tuple[str, int, int], chain: Sequence[BlockHash]) -> int:
        """0 when the store can't be asked, or could not a moment ago."""
        async with self._turns:
            if self._clock() < self._again:
                return 0
            try:
                async with loop_timeout(self._limit_s):
                    blocks = await self._store.covered(question[0], chain)
            except TimeoutError:
                self._outage.failed("no answer in time")
                self._again = self._clock() + SLOW_S
            except KvError as error:
                self._outage.failed(error)
                self._again = self._clock() + ALONE_S
            else:
                self._outage.worked()
                return blocks
            return 0
