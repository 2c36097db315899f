"""What leaves the pool as pages, and what comes back.

Synchronous and pure, like the engine that it belongs to: bytes out, bytes in. A page can only make things faster: one
that is taken in is offered like a block that was computed here, and until then nothing depends on it.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from worker.step import Spilled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.block_hash import BlockHash
    from kvstore.page import PageName
    from worker.scheduling.block_pool import BlockPool
    from worker.sequence import Sequence as Waiting
    from worker.step import PageMemory

MOST_CHAINS: Final = 64
"""Of heads that nobody has taken yet; the oldest are forgotten."""


class Paging:
    """Reads blocks that are given up before they are written over, and takes in pages of prefixes.

    All of it between steps, but for ``offers``, ``trust``, ``want``, ``take_wanted`` and ``take_heads``, which are
    another thread's.
    """

    def __init__(self, pool: BlockPool, memory: PageMemory) -> None:
        self._pool = pool
        self._memory = memory
        pool.keeps_evicted = True
        self.waiting: Iterable[Waiting] = ()
        """Sequences that wait for their admission: what they will hit has to stay."""
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
        self._heads: deque[tuple[BlockHash, ...]] = deque(maxlen=MOST_CHAINS)
        self._wanted: deque[tuple[BlockHash, int]] = deque()
        self._read_for_others: deque[Spilled] = deque()

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
            self._note_heads(page.name for page in read)

    def take(self) -> tuple[tuple[Spilled, ...], list[Exception]]:
        """What was read since the last call, of one prefix its beginning first; and what the runner raised."""
        spilled, self._spilled = self._spilled, []
        failures, self._failures = self._failures, []
        return tuple(spilled), failures

    def adopt(self, names: Sequence[PageName], payloads: Sequence[bytes | memoryview], *, evict: bool = True) -> int:
        """Offer pages of one prefix, in order, as blocks that are cached. Returns how many of them are offered now.

        They are taken from the front, as far as there is room, if what the first one continues is offered: what is
        offered stays closed under prefix. With ``evict`` colder ones go, but none that a waiting sequence will hit:
        it was here before. Without, only free blocks are used. What is wanted is read first, also if there is no page.
        """
        self._read_wanted()
        known, count = 0, _successive(names, self._pool.block_size)
        while known < count and self._pool.offers(names[known].hash):
            known += 1
        fresh = list(takewhile(lambda name: name.hash not in self.doubted, names[known:count]))
        head = self._pool.table_of(fresh[0].parent) if fresh else []
        # Else what it continues is gone, or is not what it says.
        if not fresh or len(head) != fresh[0].position or (head and self._pool.name_of(head[-1]).root != fresh[0].root):
            return known
        self._pool.share(head)  # so that it doesn't have to go for what continues it
        cached = self._pool.cached_count
        spared = self._spare(len(head) + len(fresh)) if evict else []
        aside = len(head) + cached - self._pool.cached_count
        table = self._pool.allocate(min(len(fresh), self._room(aside, evict=evict)), head) or []
        taken = self._fill(head, table, fresh, payloads[known:])
        for blocks in ([*head, *table], *spared):
            self._pool.free(blocks)
        self.adopted += taken
        if taken:
            self._note_heads([fresh[0]])
        return known + taken

    def offers(self, hash_: BlockHash) -> bool:
        """Whether this prefix is offered. From another thread it may be asked too, for an answer that soon is old."""
        return self._pool.offers(hash_)

    def trust(self, hashes: Iterable[BlockHash]) -> None:
        """No page is left that was made of these prefixes before they were in doubt. From the event loop: a set of
        bytes changes at once."""
        self.doubted.difference_update(hashes)

    def want(self, blocks: Iterable[tuple[BlockHash, int]]) -> None:
        """Pages of these, by hash and position, are to be read as soon as something is taken in, if only no page. From
        the event loop: a deque changes at once."""
        self._wanted.extend(blocks)

    def take_wanted(self) -> list[Spilled]:
        """What was wanted and has been read since the last call, heads first. From the event loop, likewise."""
        return [self._read_for_others.popleft() for _ in range(len(self._read_for_others))]

    def take_heads(self) -> list[tuple[BlockHash, ...]]:
        """What pages that were read or taken in continue, and is offered: of each the hashes of all blocks before it,
        from the first one on. From the event loop, likewise."""
        return [self._heads.popleft() for _ in range(len(self._heads))]

    def cached(self) -> list[PageName]:
        """What is cached, most recently used first: what continues a prefix comes after it."""
        return self._pool.cached()

    def read(self, names: Sequence[PageName]) -> list[Spilled]:
        """Pages of those that are offered still."""
        tables = [(self._pool.table_of(name.hash), name) for name in names]
        return self._read([(table[-1], name) for table, name in tables if table])

    def _note_heads(self, pages: Iterable[PageName]) -> None:
        """Of those whose parent is offered. The others continue one of these pages, or nothing that is here."""
        noted: set[BlockHash] = set()
        for page in pages:
            if page.position and page.parent not in noted:
                chain = [self._pool.hash_of(block) for block in self._pool.table_of(page.parent)]
                hashes = tuple(hash_ for hash_ in chain if hash_ is not None)
                noted.update(hashes)
                if hashes:
                    self._heads.append(hashes)

    def _read_wanted(self) -> None:
        """Of what is offered still, as far as there is leave: the heads."""
        wanted = dict(self._wanted.popleft() for _ in range(len(self._wanted)))
        found: dict[BlockHash, tuple[int, PageName]] = {}
        for hash_ in sorted(wanted, key=lambda hash_: -wanted[hash_]):
            if hash_ not in found:  # as the head of one before it
                names = [(block, self._pool.name_of(block)) for block in self._pool.table_of(hash_)]
                found |= {name.hash: (block, name) for block, name in names if name.hash in wanted}
        leave = max(self.leave - len(self._spilled), 0)
        read = self._read(sorted(found.values(), key=lambda each: each[1].position)[:leave]) if found else []
        self.rescued += len(read)
        self.leave -= len(read)
        self._read_for_others.extend(read)

    def _spare(self, count: int) -> list[list[int]]:
        """Takes references on what waiting sequences will hit, if so many blocks more may push out others. Returns the
        tables to be freed afterwards."""
        pool = self._pool
        if count <= pool.free_count and pool.cached_count + count <= pool.cache_blocks:
            return []
        tables: list[list[int]] = []
        for each in self.waiting:
            usable = (each.scored if each.unscored else each.num_tokens) // each.block_size
            tables.append(pool.match(each.root, each.hash_blocks(usable), each.tokens))
            pool.share(tables[-1])
        return tables

    def _room(self, aside: int, *, evict: bool) -> int:
        """Blocks that may be taken, without more being cached than may be. ``aside``: shared now, and cached again
        afterwards."""
        pool = self._pool
        if evict:
            return min(pool.available, max(pool.cache_blocks - aside, 0))
        return min(pool.free_count, max(pool.cache_blocks - pool.cached_count - aside, 0))

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
