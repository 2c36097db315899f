"""Where pages are kept outside of workers: a cache, of which anything may vanish at any time.

A store keeps values under the fingerprint of a model and the hash of a prefix. It knows nothing of what is in them, it
has a budget of bytes and drops what was used least recently, and it forgets what nobody used for its TTL. The stores:
``RedisPages`` (``page_redis``) and ``DirPages`` (``page_dir``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.block_hash import BlockHash


TTL_S: Final = 86_400.0
"""After so long without use a page is forgotten, unless somebody says otherwise."""
RANK_MS: Final = 10
"""So much longer ago a page counts as used than one of the next lower rank."""


class PageRef(NamedTuple):
    """A page in a store. Of those that are used together the ones with a higher ``rank`` are dropped first. One with a
    rank below 0 counts as used later than now."""

    hash: BlockHash
    rank: int


class StoredPage(NamedTuple):
    """A page to be stored."""

    ref: PageRef
    value: bytes


class Usage(NamedTuple):
    """What a store holds, of all models."""

    pages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PageLimits:
    """What a store may grow to."""

    budget: int
    """Bytes of all values."""
    ttl_s: float
    """After so long without use a page is forgotten."""


class PageStore(Protocol):
    """All methods but ``close`` raise KvError, and nothing else, when the store can't be used now."""

    async def covered(self, fingerprint: str, hashes: Sequence[BlockHash]) -> int:
        """How many of these are there, from the first one on. One round trip."""

    async def fetch(self, fingerprint: str, hashes: Sequence[BlockHash]) -> list[bytes]:
        """The values of these, up to the first that isn't there. One round trip, so not for too many at once."""

    async def renew(self, fingerprint: str, refs: Sequence[PageRef]) -> list[bool]:
        """Counts these as used now. Which of them are there."""

    async def put(self, fingerprint: str, pages: Sequence[StoredPage]) -> list[bool]:
        """Stores those that aren't there and renews the others. False for each that found no room."""

    async def drop(self, fingerprint: str, hashes: Sequence[BlockHash]) -> None:
        """Deletes these."""

    async def hottest(self, fingerprint: str, count: int) -> list[BlockHash]:
        """So many of those used most recently, at most: of a prefix its beginning first."""

    async def tend(self) -> Usage:
        """Drops what is too old, over the budget, or in the way of others, and tells what is left."""

    async def close(self) -> None:
        """Ends connections. Raises nothing."""
