"""What leaves the pool as pages, and what comes back.

Synchronous and pure, like the engine that it belongs to: bytes out, bytes in. A page can only make things faster: one
that is taken in is offered like a block that was computed here, and until then nothing depends on it.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from worker.step import Spilled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.block_hash import BlockHash
    from kvstore.page import PageName
    from worker.scheduling.block_pool import BlockPool
    from worker.step import PageMemory


class Paging:
    """Reads blocks that are given up before they are written over, and takes in pages of prefixes.

    All of it between steps, but for ``offers`` and ``trust``.
    """

    def __init__(self, pool: BlockPool, memory: PageMemory) -> None:
        self._pool = pool
        self._memory = memory
        pool.keeps_evicted = True
        self.leave = 0
        """So many evicted blocks may be read until they are taken."""
        self.adopted = 0
        """Blocks taken in so far."""
        self.rescued = 0
        """Evicted blocks that were read so far."""
        self.doubted: set[BlockHash] = set()
        """Prefixes whose pages are not taken in: some may be on their way that were made before the doubt."""
        self.passed_over = 0
        """Evicted blocks that were not read so far."""
        self._spilled: list[Spilled] = []
        self._failures: list[Exception] = []

    def rescue(self) -> None:
        """Read what was evicted before the runner writes to any block, as far as there is leave.

        Those evicted last are read, if there are more: they are the heads of prefixes, and were used most recently.
        """
        evicted = self._pool.take_evicted()
        count = min(len(evicted), max(self.leave - len(self._spilled), 0))
        self.passed_over += len(evicted) - count
        if count:
            read = self._read(evicted[: -count - 1 : -1])
            self._spilled += read
            self.rescued += len(read)

    def take(self) -> tuple[tuple[Spilled, ...], list[Exception]]:
        """What was read since the last call, of one prefix its beginning first; and what the runner raised."""
        spilled, self._spilled = self._spilled, []
        failures, self._failures = self._failures, []
        return tuple(spilled), failures

    def adopt(self, names: Sequence[PageName], payloads: Sequence[bytes | memoryview], *, evict: bool = True) -> int:
        """Offer pages of one prefix, in order, as blocks that are cached. Returns how many of them are offered now.

        They are taken from the front, as far as there is room, if what the first one continues is offered: what is
        offered stays closed under prefix. Without ``evict`` only free blocks are used.
        """
        known, count = 0, _successive(names, self._pool.block_size)
        while known < count and self._pool.offers(names[known].hash):
            known += 1
        fresh = list(takewhile(lambda name: name.hash not in self.doubted, names[known:count]))
        head = self._pool.table_of(fresh[0].parent) if fresh else []
        # Else what it continues is gone, or is not what it says.
        if not fresh or len(head) != fresh[0].position or (head and self._pool.name_of(head[-1]).root != fresh[0].root):
            return known
        self._pool.share(head)  # so that it doesn't have to go for what continues it
        room = self._room(len(head), evict=evict)
        table = self._pool.allocate(min(len(fresh), room), head) or []
        taken = self._fill(head, table, fresh, payloads[known:])
        self._pool.free([*head, *table])
        self.adopted += taken
        return known + taken

    def offers(self, hash_: BlockHash) -> bool:
        """Whether this prefix is offered. From another thread it may be asked too, for an answer that soon is old."""
        return self._pool.offers(hash_)

    def trust(self, hashes: Iterable[BlockHash]) -> None:
        """No page is left that was made of these prefixes before they were in doubt. From the event loop: a set of
        bytes changes at once."""
        self.doubted.difference_update(hashes)

    def cached(self) -> list[PageName]:
        """What is cached, most recently used first: what continues a prefix comes after it."""
        return self._pool.cached()

    def read(self, names: Sequence[PageName]) -> list[Spilled]:
        """Pages of those that are offered still."""
        tables = [(self._pool.table_of(name.hash), name) for name in names]
        return self._read([(table[-1], name) for table, name in tables if table])

    def _room(self, head: int, *, evict: bool) -> int:
        """Blocks that may continue a prefix of so many blocks, without more being cached than may be."""
        pool = self._pool
        if evict:
            return min(pool.available, max(pool.cache_blocks - head, 0))
        return min(pool.free_count, max(pool.cache_blocks - pool.cached_count - head, 0))

    def _fill(
        self, head: list[int], table: list[int], names: Sequence[PageName], payloads: Sequence[bytes | memoryview]
    ) -> int:
        """Write pages to blocks and offer them. Returns how many are offered."""
        self.rescue()
        if not self._tried(lambda: self._memory.write_blocks(table, payloads[: len(table)])):
            return 0
        after = head[-1] if head else None
        for count, (block, name) in enumerate(zip(table, names, strict=False)):
            if self._pool.seal(block, name.hash, name.tokens, after=after, root=name.root) != block:
                return count
            after = block
        return len(table)

    def _read(self, blocks: Sequence[tuple[int, PageName]]) -> list[Spilled]:
        payloads: list[bytes] = []
        if not self._tried(lambda: payloads.extend(self._memory.read_blocks([block for block, _ in blocks]))):
            self.passed_over += len(blocks)
            return []
        return [Spilled(name, payload) for (_, name), payload in zip(blocks, payloads, strict=True)]

    def _tried(self, do: Callable[[], None]) -> bool:
        """Whether it went well. The runner may raise anything, and no request is to suffer for a page."""
        try:
            do()
        except Exception as failure:
            self._failures.append(failure)
            return False
        return True


def _successive(names: Sequence[PageName], block_size: int) -> int:
    """How many of them, from the front, are whole blocks of one prefix in order."""
    for count, name in enumerate(names):
        if len(name.tokens) != block_size:
            return count
        before = names[count - 1] if count else None
        place = (name.root, name.parent, name.position)
        if before is not None and place != (before.root, before.hash, before.position + 1):
            return count
    return len(names)
