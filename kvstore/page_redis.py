"""Pages in Redis or Valkey: in the broker's own server or, better, in another one.

They never take a server's last memory from jobs: where it evicts nothing by itself, pages go before it is full.
"""

from __future__ import annotations

import time
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, Final

from kvstore.block_hash import BlockHash
from kvstore.client import Broker, BrokerConfig
from kvstore.errors import BrokerError
from kvstore.page_store import RANK_MS, PageLimits, PageRef, StoredPage, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARE: Final = 0.9
"""Of maxmemory: what is above it is left to jobs."""
LOOKED_AT: Final = 4096
"""Names in a search for the hottest pages."""
TIMEOUT_S: Final = 2.0
HASH_BYTES: Final = 32


class RedisPages:
    """A `page_store.PageStore`. Connects when it is first used; nothing is asked twice."""

    def __init__(self, url: str, namespace: str, limits: PageLimits) -> None:
        """Raises BrokerUrl for what is no URL of a server."""
        config = BrokerConfig(
            url,
            namespace,
            connect_timeout_s=TIMEOUT_S,
            command_timeout_s=TIMEOUT_S,
            retries=0,
            max_connections=4,
        )
        self._broker = Broker(config)
        self._limits = limits

    async def covered(self, fingerprint: str, hashes: Sequence[BlockHash]) -> int:
        """How many of these are there, from the first one on."""
        keys = self._broker.keys
        arguments = [keys.page(fingerprint, ""), *(hash_.hex() for hash_ in hashes)]
        return int(await self._broker.script("pages_covered", [keys.pages], arguments))

    async def fetch(self, fingerprint: str, hashes: Sequence[BlockHash]) -> list[bytes]:
        """The values of these, up to the first that isn't there."""
        if not hashes:
            return []
        names = [self._broker.keys.page(fingerprint, hash_.hex()) for hash_ in hashes]
        return [*takewhile(lambda value: value is not None, await self._broker.call("MGET", *names))]

    async def renew(self, fingerprint: str, refs: Sequence[PageRef]) -> list[bool]:
        """Counts these as used now. Which of them are there."""
        if not refs:
            return []
        arguments = chain.from_iterable((_name(fingerprint, ref.hash), ref.rank * RANK_MS) for ref in refs)
        return [bool(answer) for answer in await self._script("renew", arguments)]

    async def put(self, fingerprint: str, pages: Sequence[StoredPage]) -> list[bool]:
        """Stores those that aren't there and renews the others. One round trip for each, so that none takes long."""
        began, taken = time.monotonic(), []
        for ref, value in pages:
            # All are put together, however long it takes.
            age_ms = ref.rank * RANK_MS + (time.monotonic() - began) * 1000
            (answer,) = await self._script("put", (_name(fingerprint, ref.hash), int(age_ms), value))
            taken.append(bool(answer))
        return taken

    async def drop(self, fingerprint: str, hashes: Sequence[BlockHash]) -> None:
        """Deletes these."""
        if hashes:
            await self._script("drop", (_name(fingerprint, hash_) for hash_ in hashes))

    async def hottest(self, fingerprint: str, count: int) -> list[BlockHash]:
        """Among the pages of all models that were used last."""
        (names,) = await self._broker.pipeline([("ZRANGE", self._broker.keys.pages, 0, LOOKED_AT - 1, "REV")])
        if isinstance(names, BrokerError):  # a key of another type, which the next who writes deletes
            self._broker.malformed += 1
            return []
        start = f"{fingerprint}:".encode()
        found: list[BlockHash] = []
        for name in names:
            if name.startswith(start) and len(found) < count:
                hash_ = _hash(name.removeprefix(start))
                if hash_ is None:
                    self._broker.malformed += 1
                else:
                    found.append(hash_)
        return found

    async def tend(self) -> Usage:
        """Drops what is too old, over the budget, or in the way of jobs, and tells what is left."""
        while (await self._script("put", ()))[0]:  # one call drops so many at most
            pass
        keys = self._broker.keys
        pages = await self._broker.call("ZCARD", keys.pages)
        total = await self._broker.call("HGET", keys.page_sizes, "total")
        if total is not None and not total.isdigit():
            self._broker.malformed += 1
            total = None
        return Usage(int(pages), int(total or 0))

    async def close(self) -> None:
        """Closes the connections."""
        await self._broker.close()

    async def _script(self, operation: str, arguments: Any) -> list[int]:
        keys = self._broker.keys
        limits = (int(self._limits.ttl_s * 1000), self._limits.budget, SHARE)
        answers: list[int] = await self._broker.script(
            "pages", [keys.pages, keys.page_sizes], [operation, keys.prefix, *limits, *arguments]
        )
        return answers


def _hash(name: bytes) -> BlockHash | None:
    """None for what names no block: somebody else wrote it."""
    try:
        hash_ = BlockHash(bytes.fromhex(name.decode()))
    except ValueError:
        return None
    return hash_ if len(hash_) == HASH_BYTES else None


def _name(fingerprint: str, hash_: BlockHash) -> str:
    return f"{fingerprint}:{hash_.hex()}"
