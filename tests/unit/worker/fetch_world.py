"""An engine that takes pages when the test lets it, and a store that they come from."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.page import names_of
from tests.unit.worker.engine_run import BS, engine_of, request
from tests.unit.worker.page_store import FORM, Shop
from worker.fetch import Fetch

if TYPE_CHECKING:
    from kvstore.page import PageName
    from kvstore.page_store import PageRef
    from worker.stepper import Adoption

PROMPT = [*range(4, 4 + 5 * BS), 9]
RATE = 10.0
"""Tokens a second that are computed: so slow that fetching always pays."""


class World:
    """An engine that takes pages when the test lets it, and a store."""

    def __init__(self, *, buffer_pages: int = 100, rate: float = RATE) -> None:
        self.shop = Shop()
        self.engine, _ = engine_of(64, paging=True)
        assert self.engine.paging is not None
        self.paging = self.engine.paging
        self.posted: list[Adoption] = []
        self.takes = True
        self.used: list[PageRef] = []
        self.fetch = Fetch(
            self.shop.client,
            self.engine,
            self.paging,
            self.adopt,
            self.used.extend,
            lambda: rate,
            buffer_pages * FORM.page_bytes,
        )
        self.names = self.names_of(PROMPT)

    def names_of(self, prompt: list[int], salt: str = "") -> list[PageName]:
        return names_of(self.engine.root_of(salt), tuple(prompt), BS)

    def adopt(self, adoption: Adoption) -> None:
        self.posted.append(adoption)
        if self.takes:
            self.take()

    def take(self) -> None:
        """The engine's thread takes what it was given."""
        for adoption in self.posted:
            adoption.taken(self.paging.adopt(adoption.names, adoption.payloads, evict=adoption.evict))
        self.posted.clear()

    def store(self, *indexes: int) -> None:
        for index in indexes:
            name = self.names[index]
            self.shop.store.values[name.hash] = FORM.encode(name, bytes([index]) * FORM.page_bytes)

    def offered(self) -> list[int]:
        return [index for index, name in enumerate(self.names) if self.paging.offers(name.hash)]

    async def prepare(self, **changes: object) -> int:
        async with asyncio.timeout(10):
            lacking = self.fetch.lacking(request("a", PROMPT, **changes))  # type: ignore[arg-type]
            return await self.fetch.prepare(lacking, "a")
