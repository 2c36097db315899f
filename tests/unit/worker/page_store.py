"""A store of pages in this process, that fails when it is told to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry

from kvstore.block_hash import BlockHash, root
from kvstore.errors import BrokerUnreachable
from kvstore.page import PageFormat, PageName, names_of
from kvstore.page_store import PageRef, StoredPage, Usage
from worker.page_client import PageClient
from worker.page_metrics import PageMetrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

T = TypeVar("T")

BS = 4
FORM = PageFormat("paged model", "digests", BS, 32)
ROOT = root(FORM.fingerprint, BS)


def names(*blocks: int) -> list[PageName]:
    """Of a prompt whose block ``n`` holds the tokens 10n, 10n + 1, ..."""
    return names_of(ROOT, tuple(10 * block + slot for block in blocks for slot in range(BS)), BS)


class MemoryPages:
    """A `page_store.PageStore`."""

    def __init__(self) -> None:
        self.values: dict[BlockHash, bytes] = {}
        """Those used last are last."""
        self.room = 1000
        """Pages."""
        self.calls: list[str] = []
        self.renewed: list[list[PageRef]] = []
        """In each call."""
        self.fails = False
        self.held = asyncio.Event()
        """Calls wait for it."""
        self.held.set()

    async def covered(self, _: str, hashes: Sequence[BlockHash]) -> int:
        await self._answer("covered")
        return next((index for index, hash_ in enumerate(hashes) if hash_ not in self.values), len(hashes))

    async def fetch(self, _: str, hashes: Sequence[BlockHash]) -> list[bytes]:
        await self._answer("fetch")
        known = next((index for index, hash_ in enumerate(hashes) if hash_ not in self.values), len(hashes))
        return [self.values[hash_] for hash_ in hashes[:known]]

    async def renew(self, _: str, refs: Sequence[PageRef]) -> list[bool]:
        await self._answer("renew")
        self.renewed.append([*refs])
        return [ref.hash in self.values for ref in refs]

    async def put(self, _: str, pages: Sequence[StoredPage]) -> list[bool]:
        await self._answer("put")
        taken = []
        for page in pages:
            taken.append(len(self.values) < self.room)
            if taken[-1]:
                self.values[page.ref.hash] = page.value
        return taken

    async def drop(self, _: str, hashes: Sequence[BlockHash]) -> None:
        await self._answer("drop")
        for hash_ in hashes:
            self.values.pop(hash_, None)

    async def hottest(self, _: str, count: int) -> list[BlockHash]:
        await self._answer("hottest")
        return [*self.values][:count]

    async def tend(self) -> Usage:
        await self._answer("tend")
        return Usage(len(self.values), sum(map(len, self.values.values())))

    async def close(self) -> None:
        self.calls.append("close")

    async def _answer(self, call: str) -> None:
        self.calls.append(call)
        await self.held.wait()
        if self.fails:
            raise BrokerUnreachable("it does not answer")


class Shop:
    """A client of such a store, and what it counts."""

    def __init__(self) -> None:
        self.store = MemoryPages()
        self.registry = CollectorRegistry()
        self.client = PageClient(self.store, FORM, PageMetrics(self.registry))

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"octavo_pages_{name}", labels) or 0.0

    def events(self) -> dict[str, float]:
        """Those that happened."""
        return {
            sample.labels["event"]: sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "octavo_pages_total" and sample.value
        }

    def misses(self) -> dict[str, float]:
        """Those that happened."""
        return {
            sample.labels["reason"]: sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "octavo_pages_misses_total" and sample.value
        }


async def soon(condition: Awaitable[T]) -> T:
    async with asyncio.timeout(10):
        return await condition
