"""A block's accounting, and what is told about the prefixes that a pool offers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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
