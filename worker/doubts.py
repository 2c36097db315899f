"""When a prefix whose pages were in doubt may be fetched again.

Its blocks are forgotten by the pool at once, and its pages are deleted from the store soon after. Until then, and as
long as anybody has pages in hand that were read before that, none of them is taken in.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.block_hash import BlockHash
    from worker.paging import Paging


class Doubts:
    """The event loop's."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._in_hand = 0
        """How often pages are read, or on their way to the engine, just now."""
        self._deleted: set[BlockHash] = set()

    def hold(self) -> None:
        """Pages are in hand, until ``release``."""
        self._in_hand += 1

    def release(self) -> None:
        """They are taken in, or dropped."""
        self._in_hand -= 1
        self._settle()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Pages are in hand meanwhile."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def deleted(self, hashes: Sequence[BlockHash]) -> None:
        """The store has no pages any more of these prefixes, which were in doubt."""
        self._deleted.update(hashes)
        self._settle()

    def _settle(self) -> None:
        if self._deleted and not self._in_hand:
            self._paging.trust(self._deleted)
            self._deleted.clear()
