"""The fixed set of blocks of one worker.

Every block is in exactly one of three states::

               allocate                      free, not sealed
      free  ------------->  used (refs > 0)  ----------------->  free
                              ^         |
                        share |         | free, sealed
                              |         v
                              cached (refs == 0, still found by its hash)  ---- evicted by allocate ---->  used

``free + cached + used == total`` always. A block is *sealed*, that is given its hash and so offered to others, only
after the step that wrote it has finished; from then on it is never written again until it has been evicted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.block_hash import BlockHash


class IntegrityError(AssertionError):
    """The accounting of blocks contradicts itself: a fault of this program."""


@dataclass(slots=True)
class Block:
    """One block's accounting. Its keys and values live in the model's pages, at the same id."""

    id: int
    refs: int = 0
    """How many block tables name it."""
    hash: BlockHash | None = None
    parent: BlockHash | None = field(default=None, repr=False)
    tokens: tuple[int, ...] = field(default=(), repr=False)
    """With a hash: what was hashed, so that a hit never rests on the hash alone."""


class BlockPool:
    """Hands out blocks, counts who uses them, and finds those that hold a known prefix."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """A pool of ``num_blocks`` free blocks of ``block_size`` token positions each."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least 1 block of 1 token, not {num_blocks} of {block_size}")
        self.block_size = block_size
        self.evictions = 0
        self._blocks = [Block(index) for index in range(num_blocks)]
        # Last freed, first reused: its pages are still warm in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}

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

    def in_use(self, block: int) -> bool:
        """Whether some table names the block, so that sharing it takes nothing from ``available``."""
        return self._blocks[block].refs > 0

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks with one reference each, or none at all (None) when there aren't as many.

        Free blocks go first; then cached ones are evicted, least recently used first.
        """
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            block = self._blocks[self._free.pop() if self._free else self._evict()]
            block.refs = 1
            taken.append(block.id)
        return taken

    def match(self, root: BlockHash, hashes: Sequence[BlockHash], token_ids: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known prefix, in order. Takes no reference: ``share`` does.

        ``hashes[i]`` names the prefix that ends with block ``i`` of ``token_ids``; ``root`` is the first one's parent.
        A block counts only if its own token ids and its parent's hash are equal too.
        """
        found: list[int] = []
        parent = root
        for index, hash_ in enumerate(hashes):
            block_id = self._by_hash.get(hash_)
            if block_id is None:
                break
            block = self._blocks[block_id]
            start = index * self.block_size
            if block.parent != parent or block.tokens != tuple(token_ids[start : start + self.block_size]):
                break
            found.append(block_id)
            parent = hash_
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each of these sealed blocks."""
        for block_id in blocks:
            block = self._blocks[block_id]
            if block.refs == 0:
                del self._cached[block_id]
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

    def seal(self, block: int, parent: BlockHash, hash_: BlockHash, tokens: tuple[int, ...]) -> bool:
        """Offer a used, fully written block to others. Only called after the step that wrote it has finished.

        False, and no change, when another block holds that prefix already: this one then stays private.
        """
        entry = self._blocks[block]
        if entry.refs < 1 or entry.hash is not None or len(tokens) != self.block_size:
            raise IntegrityError(f"{entry} can't be sealed with {len(tokens)} tokens")
        if hash_ in self._by_hash:
            return False
        entry.hash, entry.parent, entry.tokens = hash_, parent, tokens
        self._by_hash[hash_] = block
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Stop offering these blocks to others, for their content is in doubt. Present users keep them."""
        for block_id in blocks:
            block = self._blocks[block_id]
            self._unseal(block)
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.append(block_id)

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise IntegrityError unless the books balance; with ``tables``, unless they explain every reference."""
        used = {block.id for block in self._blocks if block.refs > 0}
        states = Counter([*self._free, *self._cached, *used])
        if states != Counter(range(self.total)):
            raise IntegrityError(f"blocks lost or in two states: {self._free}, {[*self._cached]}, {used}")
        if any(block.refs < 0 for block in self._blocks):
            raise IntegrityError("a block has a negative count of references")
        hashed = {block.hash: block.id for block in self._blocks if block.hash is not None}
        if hashed != self._by_hash or len(hashed) != sum(block.hash is not None for block in self._blocks):
            raise IntegrityError("the index of hashes differs from the blocks' own")
        if any(self._blocks[block_id].hash is None for block_id in self._cached):
            raise IntegrityError("a cached block can't be found by any hash")
        if any(self._blocks[block_id].hash is not None for block_id in self._free):
            raise IntegrityError("a free block can still be hit")
        if tables is not None:
            named = Counter(block_id for table in tables for block_id in table)
            if named != Counter({block.id: block.refs for block in self._blocks if block.refs}):
                raise IntegrityError(f"tables name {dict(named)}, which differs from the blocks' references")

    def hash_of(self, block: int) -> BlockHash | None:
        """The hash under which a block is offered, or None."""
        return self._blocks[block].hash

    def _retire(self, block: Block) -> None:
        if block.hash is None:
            self._free.append(block.id)
        else:
            self._cached[block.id] = None

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._unseal(self._blocks[block_id])
        self.evictions += 1
        return block_id

    def _unseal(self, block: Block) -> None:
        if block.hash is not None:
            del self._by_hash[block.hash]
        block.hash, block.parent, block.tokens = None, None, ()
