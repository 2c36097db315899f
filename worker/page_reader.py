"""Reads pages from the store, and looks at each of them: what is not exactly what was asked for is a miss.

It is counted by its reason, and deleted.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvstore.page import Fault, PageInvalid, PageName
from worker.page_client import CALL_S
from worker.page_metrics import ABSENT, LATE, UNREACHABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.block_hash import BlockHash
    from worker.page_client import PageClient

logger = logging.getLogger(__name__)

Pages = list[tuple[PageName, memoryview]]


class Reader:
    """Of one worker's pages."""

    def __init__(self, client: PageClient) -> None:
        self._client = client

    async def values(self, hashes: Sequence[BlockHash], names: Sequence[PageName] | None, until: float) -> Pages | None:
        """Sound pages under these hashes, up to the first that is not. None: no store, or none that is fast enough.

        ``names``: what they must be; without, the pages tell it themselves, and all that are sound are given.
        """
        client, metrics = self._client, self._client.metrics
        left = until - time.monotonic()
        if left <= 0:
            metrics.miss(LATE)
            return None
        values = await client.call(
            lambda: client.store.fetch(client.form.fingerprint, hashes), limit_s=min(left, CALL_S), reads=True
        )
        if values is None:
            metrics.miss(LATE if time.monotonic() >= until else UNREACHABLE)
            return None
        if len(values) < len(hashes):
            metrics.miss(ABSENT)
        metrics.moved("in", sum(map(len, values)))
        pages, wrong = await client.beside(lambda: self._checked(values, hashes, names))
        metrics.pages("fetched", len(pages))
        for hash_, fault in wrong:
            metrics.miss(fault.value)
            logger.warning("page %s is deleted, as it can't be used: %s", hash_.hex(), fault.value)
        if wrong:
            await client.call(lambda: client.store.drop(client.form.fingerprint, [hash_ for hash_, _ in wrong]))
        return pages

    def _checked(
        self, values: Sequence[bytes], hashes: Sequence[BlockHash], names: Sequence[PageName] | None
    ) -> tuple[Pages, list[tuple[BlockHash, Fault]]]:
        """Sound pages, and what is wrong with others. In the thread for checksums."""
        form, pages = self._client.form, Pages()
        wrong: list[tuple[BlockHash, Fault]] = []
        for index, (value, hash_) in enumerate(zip(values, hashes, strict=False)):
            try:
                name, payload = form.read(value)
                if name.hash != hash_ or (names is not None and name != names[index]):
                    raise PageInvalid(Fault.PLACE)
            except PageInvalid as invalid:
                fault = invalid.fault
            except Exception:  # a fault of ours: this page would raise it again and again
                logger.exception("page %s can't be read", hash_.hex())
                fault = Fault.NOT_A_PAGE
            else:
                pages.append((name, payload))
                continue
            if names is not None:
                return pages, [(hash_, fault)]
            if fault is not Fault.LAYOUT:  # such a page is sound, and another fleet's: one with other blocks, say
                wrong.append((hash_, fault))
        return pages, wrong
