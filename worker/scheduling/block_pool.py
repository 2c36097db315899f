"""The fixed set of blocks of one worker.

Every block is in exactly one of three states::

               allocate                      free, not offered
      free  ------------->  used (refs > 0)  ----------------->  free
       ^                      ^         |
       |                share |         | free, offered
       | forget, clear,       |         v
       +--------------------  cached (refs == 0, still found by its hash)  ---- evicted by allocate ---->  used
         more than cache_blocks

``free + cached + used == total`` always. A block is *offered* (sealed: given its hash, so that others find it) only
after the step that wrote it has finished. From then on nobody writes to it until it is offered no more.

What is offered is closed under prefix: a block is offered only as the continuation of an offered one, or of a root::

      root <- A <- B <- C        B continues A: it was sealed ``after`` A
                     <- D        one prefix has one block; a second one with the same content gives way to it

Whoever uses C uses A and B too, and gives C back first. So in the order of eviction, least recently used first, C comes
before B and B before A, and what is evicted is never the head of something that stays.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.page import PageName
from worker.scheduling.ages import Ages
from worker.scheduling.block import Block, Event, EventKind, IntegrityError, check_offers, check_states
from worker.scheduling.free_list import FreeRuns, FreeStack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.block_hash import BlockHash


class BlockPool:
    """Hands out blocks, counts who uses them, and finds those that hold a known prefix."""

    def __init__(self, num_blocks: int, block_size: int, cache_blocks: int | None = None, block_run: int = 1) -> None:
        """A pool of ``num_blocks`` free blocks of ``block_size`` token positions each.

        At most ``cache_blocks`` of them stay cached at once; None: as many as there are. Which of several free blocks
        comes next: a neighbour, in runs of up to ``block_run``; with 1, the one freed last.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least 1 block of 1 token, not {num_blocks} of {block_size}")
        if cache_blocks is not None and cache_blocks < 0:
            raise ValueError(f"cache_blocks is {cache_blocks}; it must be at least 0")
        if block_run < 1:
            raise ValueError(f"block_run is {block_run}; it must be at least 1")
        self.block_size = block_size
        self.cache_blocks = num_blocks if cache_blocks is None else cache_blocks
        self.evictions = 0
        """Cached blocks given up so far, for new content or under the cache's limit."""
        self.stored = 0
        """Blocks offered so far."""
        self.returns = 0
        """Blocks that became available so far. While this stands still there is no more room than there was."""
        self.ages = Ages()
        self._blocks = [Block(index) for index in range(num_blocks)]
        self._free = FreeStack(num_blocks) if block_run == 1 else FreeRuns(num_blocks, block_run)
        # Least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        # In the order in which they were offered, so that parents come before what continues them.
        self._by_hash: dict[BlockHash, int] = {}
        self._events: list[Event] = []
        self.keeps_evicted = False
        """Whether ``take_evicted`` is called, before any block that was evicted is written to."""
        self._evicted: list[tuple[int, PageName]] = []

    @property
    def total(self) -> int:
        return len(self._blocks)

    @property
    def free_count(self) -> int:
        """Blocks without any content worth keeping."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that nobody uses but that can still be hit."""
        return len(self._cached)

    @property
    def used_count(self) -> int:
        return len(self._blocks) - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """How many blocks ``allocate`` could hand out now."""
        return len(self._free) + len(self._cached)

    def refs(self, block: int) -> int:
        """How many references there are to a block. With any, sharing it takes nothing from ``available``."""
        return self._blocks[block].refs

    def hash_of(self, block: int) -> BlockHash | None:
        """The hash under which a block is offered, or None."""
        return self._blocks[block].hash

    def name_of(self, block: int) -> PageName:
        """Of the page that an offered block would make."""
        return self._blocks[block].name

    def offers(self, hash_: BlockHash) -> bool:
        """Whether a block is offered under this hash, whatever its content."""
        return hash_ in self._by_hash

    def writable(self, block: int, sources: int = 0) -> bool:
        """Whether a block's only user may write to it; else it must be copied first.

        ``sources`` of its references are held by copies that are made before anything is written.
        """
        entry = self._blocks[block]
        return entry.refs - sources == 1 and entry.hash is None

    def allocate(self, count: int, table: Sequence[int] = ()) -> list[int] | None:
        """Take ``count`` blocks with one reference each, or none at all (None) when there aren't as many.

        Free blocks go first; then cached ones are evicted, least recently used first. ``table`` is what the blocks are
        to continue: where they may be neighbours, they are neighbours of its last one.
        """
        free = min(count, len(self._free))
        if count > free + len(self._cached):
            return None
        taken = self._free.take(free, table)
        if free < count:
            taken += self._free.in_order([self._evict() for _ in range(count - free)])
        for block_id in taken:
            self._blocks[block_id].refs = 1
        return taken

    def match(self, root: BlockHash, hashes: Sequence[BlockHash], token_ids: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known prefix, in order. Takes no reference: ``share`` does.

        ``hashes[i]`` names the prefix that ends with block ``i`` of ``token_ids``; ``root`` is the first one's parent.
        A block counts only if it has the same token ids and continues the block before it, not only its hash.
        """
        found: list[int] = []
        for index, hash_ in enumerate(hashes):
            block_id = self._by_hash.get(hash_)
            if block_id is None:
                break
            start = index * self.block_size
            tokens = tuple(token_ids[start : start + self.block_size])
            if not self._holds(self._blocks[block_id], found[-1] if found else None, root, tokens):
                break
            found.append(block_id)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each of these blocks, which must be used or cached."""
        for block_id in blocks:
            block = self._blocks[block_id]
            if block.refs == 0:
                if block.hash is None:
                    raise IntegrityError(f"{block} is free and can't be shared")
                del self._cached[block_id]
                self.ages.reused(block)
            block.refs += 1

    def free(self, table: Sequence[int]) -> None:
        """Give back one reference on each block of a table.

        The tail goes first, so that a prefix's tail is evicted before its head: without its head it can't be hit.
        """
        for block_id in reversed(table):
            block = self._blocks[block_id]
            if block.refs < 1:
                raise IntegrityError(f"block {block_id} is freed more often than it was taken")
            block.refs -= 1
            if block.refs == 0:
                self._retire(block)

    def seal(
        self, block: int, hash_: BlockHash, tokens: tuple[int, ...], *, after: int | None, root: BlockHash
    ) -> int | None:
        """Offer a used, fully written block to others. Only called after the step that wrote it has finished.

        ``after`` is the block before it in its table, None for the first, which continues ``root``. Returns the block
        that is offered for this prefix: this one, or another that holds the same already, for the caller to use in its
        place. None when there can be none: ``after`` is not offered itself, or another prefix has this hash. What
        follows in the table can't be offered then either.
        """
        entry = self._blocks[block]
        if entry.refs < 1 or entry.hash is not None or len(tokens) != self.block_size:
            raise IntegrityError(f"{entry} can't be sealed with {len(tokens)} tokens")
        parent = root if after is None else self._blocks[after].hash
        if parent is None:
            return None
        known = self._by_hash.get(hash_)
        if known is not None:
            return known if self._holds(self._blocks[known], after, root, tokens) else None
        entry.offer(PageName(root, parent, hash_, 0 if after is None else self._blocks[after].index + 1, tokens), after)
        self.ages.offered(entry)
        self._by_hash[hash_] = block
        self.stored += 1
        self._events.append(Event(EventKind.STORED, hash_))
        return block

    def forget(self, blocks: Iterable[int]) -> list[BlockHash]:
        """Stop offering these blocks and all that continue them, for their content is in doubt. Returns their hashes.

        Present users keep them. Those that aren't offered are passed over.
        """
        doomed = {block_id for block_id in blocks if self._blocks[block_id].hash is not None}
        if not doomed:
            return []
        for block_id in self._by_hash.values():  # parents first
            if self._blocks[block_id].after in doomed:
                doomed.add(block_id)
        forgotten = [hash_ for hash_, known in self._by_hash.items() if known in doomed]
        for block_id in [self._by_hash[hash_] for hash_ in reversed(forgotten)]:
            self._withdraw(self._blocks[block_id])
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.add(block_id)
        return forgotten

    def clear(self) -> None:
        """Stop offering anything. Present users keep their blocks."""
        for block_id in self._by_hash.values():
            self._blocks[block_id].withdraw()
        self._by_hash.clear()
        for block_id in self._cached:
            self._free.add(block_id)
        self._cached.clear()
        self._events.append(Event(EventKind.CLEARED))

    def take_events(self) -> tuple[Event, ...]:
        """What has changed in what is offered since the last call. It is kept until then: call it after every step."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def take_evicted(self) -> list[tuple[int, PageName]]:
        """Blocks evicted since the last call, in order, and what they hold until somebody writes to them."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def table_of(self, hash_: BlockHash) -> list[int]:
        """The blocks of the prefix that is offered under this hash, in order; none if none is."""
        table: list[int] = []
        block_id = self._by_hash.get(hash_)
        while block_id is not None:
            table.append(block_id)
            block_id = self._blocks[block_id].after
        return table[::-1]

    def cached(self) -> list[PageName]:
        """What is cached, most recently used first: so what continues a prefix comes after it."""
        return [self._blocks[block_id].name for block_id in reversed(self._cached)]

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise IntegrityError unless the books balance; with ``tables``, unless they explain every reference."""
        self._free.check_integrity(check_states(self._blocks, self._free, self._cached, tables))
        if len(self._cached) > self.cache_blocks:
            raise IntegrityError(f"{len(self._cached)} blocks are cached; at most {self.cache_blocks} may be")
        check_offers(self._blocks, self._by_hash, self._cached, self._free)

    def _holds(self, block: Block, after: int | None, root: BlockHash, tokens: tuple[int, ...]) -> bool:
        """Whether an offered block has this content, as the continuation of just this prefix."""
        return block.after == after and block.tokens == tokens and (after is not None or block.parent == root)

    def _retire(self, block: Block) -> None:
        self.returns += 1
        if block.hash is None:
            self._free.add(block.id)
            return
        self._cached[block.id] = None
        self.ages.rested(block)
        self._free.rest(block.id)
        if len(self._cached) > self.cache_blocks:
            self._free.add(self._evict())

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        if self.keeps_evicted:
            self._evicted.append((block_id, self._blocks[block_id].name))
        self.ages.evicted(self._blocks[block_id])
        self._withdraw(self._blocks[block_id])
        self.evictions += 1
        return block_id

    def _withdraw(self, block: Block) -> None:
        if block.hash is None:
            raise IntegrityError(f"{block} isn't offered")
        del self._by_hash[block.hash]
        self._events.append(Event(EventKind.EVICTED, block.hash))
        block.withdraw()
