"""A block's accounting, and what is told about the prefixes that a pool offers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvstore.page import PageName

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kvstore.block_hash import BlockHash


class IntegrityError(AssertionError):
    """The accounting of blocks contradicts itself: a fault of this program."""


class EventKind(Enum):
    """What may happen to the set of prefixes that a pool offers."""

    STORED = "stored"
    EVICTED = "evicted"
    """Given up for new content or under the cache's limit, or forgotten."""
    CLEARED = "cleared"
    """All at once."""


class Event(NamedTuple):
    """One change in what a pool offers. Applied in order they give the set of hashes that it offers now."""

    kind: EventKind
    hash: BlockHash | None = None
    """None with CLEARED."""


@dataclass(slots=True)
class Block:
    """One block's accounting. Its keys and values live in the model's pages, at the same id."""

    id: int
    refs: int = 0
    """How many block tables name it, and copies that still have to be made from it."""
    hash: BlockHash | None = None
    """The name under which it is offered, or None."""
    parent: BlockHash | None = field(default=None, repr=False)
    after: int | None = None
    """The offered block that it continues; None also for the first of a prefix, whose ``parent`` is a root."""
    tokens: tuple[int, ...] = field(default=(), repr=False)
    """With a hash: what was hashed, so that a hit never rests on the hash alone."""
    root: BlockHash | None = field(default=None, repr=False)
    """With a hash: of the empty prefix under the same salt."""
    index: int = field(default=0, repr=False)
    """With a hash: of the block in its prefix."""
    offered_at: float = field(default=0.0, repr=False, compare=False)
    """With a hash, as the next: when it got that, and when its last user gave it back (``ages``)."""
    idle_since: float = field(default=0.0, repr=False, compare=False)

    @property
    def name(self) -> PageName:
        """Of the page that an offered block would make."""
        if self.hash is None or self.parent is None or self.root is None:
            raise IntegrityError(f"{self} isn't offered")
        return PageName(self.root, self.parent, self.hash, self.index, self.tokens)

    def offer(self, name: PageName, after: int | None) -> None:
        """It holds this, and others may find it."""
        self.root, self.parent, self.hash, self.index, self.tokens = name
        self.after = after

    def withdraw(self) -> None:
        """Nobody is to find it any more."""
        self.hash, self.parent, self.after, self.tokens, self.root, self.index = None, None, None, (), None, 0


def check_states(
    blocks: Sequence[Block], free: Iterable[int], cached: Collection[int], tables: Iterable[Sequence[int]] | None
) -> set[int]:
    """Raise IntegrityError unless each block is in one state, and the tables, where there are any, explain every
    reference. Returns those that are used."""
    used = {block.id for block in blocks if block.refs > 0}
    if Counter([*free, *cached, *used]) != Counter(range(len(blocks))):
        raise IntegrityError(f"blocks lost or in two states: {[*free]}, {[*cached]}, {used}")
    if any(block.refs < 0 for block in blocks):
        raise IntegrityError("a block has a negative count of references")
    if tables is not None:
        named = Counter(block_id for table in tables for block_id in table)
        if named != Counter({block.id: block.refs for block in blocks if block.refs}):
            raise IntegrityError(f"tables name {dict(named)}, which differs from the blocks' references")
    return used


def check_offers(
    blocks: Sequence[Block], by_hash: Mapping[BlockHash, int], cached: Collection[int], free: Iterable[int]
) -> None:
    """Raise IntegrityError unless what is offered is found, is whole, is closed under prefix, and is evicted from its
    ends. ``cached``: least recently used first."""
    hashed = {block.hash: block.id for block in blocks if block.hash is not None}
    if hashed != by_hash or len(hashed) != sum(block.hash is not None for block in blocks):
        raise IntegrityError("the index of hashes differs from the blocks' own")
    if any(blocks[block_id].hash is None for block_id in cached):
        raise IntegrityError("a cached block can't be found by any hash")
    if any(blocks[block_id].hash is not None for block_id in free):
        raise IntegrityError("a free block can still be hit")
    # The later it is evicted the higher; used ones after all that are cached.
    total = len(blocks)
    rank = {block_id: index for index, block_id in enumerate(cached)}
    for block in blocks:
        if block.hash is None:
            if block != Block(block.id, block.refs):
                raise IntegrityError(f"{block} has a content but no name")
        elif block.after is None:
            if block.index or block.parent != block.root:
                raise IntegrityError(f"{block} continues nothing and is no first one")
        else:
            before = blocks[block.after]
            if before.hash is None or before.hash != block.parent:
                raise IntegrityError(f"{block} continues {before}, which is not offered")
            if (before.root, before.index + 1) != (block.root, block.index):
                raise IntegrityError(f"{block} is of another prefix than {before}, which it continues")
            if rank.get(block.id, total) >= rank.get(before.id, total + 1):
                raise IntegrityError(f"{before} would be evicted before {block}, which continues it")
