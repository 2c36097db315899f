"""What the prefix index shows of this worker: a mirror of the pool's offers, and what of it Redis has not got yet.

::

    pool's events --apply--> offered            what the pool offers
                                |  net change
                              take   --------->  in flight  --settled--> shown       what Redis has

Pure: no I/O, no clock. Redis is changed by one caller at a time, who repeats a change until it is settled: repeating is
harmless, as sets know no counts. Whatever else happens to the set in Redis (flushed, evicted, deleted) is *drift*. It
shows in the number of members, which commits and renewals of the lease tell, and in the members, which are read now and
then. Drift is mended by writing the whole set anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.prefix_index import HeldChange, short
from worker.scheduling.block import EventKind, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from worker.scheduling.block import Event


class Held:
    """Short hashes of the prefixes that the pool offers, and how far Redis is behind."""

    def __init__(self) -> None:
        self.drifted = False
        """Whether Redis was found to differ: until ``replaced``."""
        self.drifts = 0
        """How often it was. Only ever grows."""
        # All in order, for a change of thousands is written in parts, each of which leaves the set closed under prefix:
        # what is added comes parents first, what is removed parents last.
        self._offered: dict[bytes, None] = {}
        # Between what is offered and what Redis has, once the change in flight is settled. Disjoint.
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._in_flight: HeldChange | None = None
        self._changes = 0
        self._touched: set[bytes] | None = None
        """While members are being read: those that may or may not be among them."""

    @property
    def offered(self) -> AbstractSet[bytes]:
        """What the pool offers, as far as its events have been applied."""
        return self._offered.keys()

    @property
    def pending(self) -> bool:
        """Whether there is a change to take, or drift to mend."""
        return bool(self._added or self._removed or self.drifted)

    @property
    def count(self) -> int:
        """Members that Redis has, once the change in flight is settled."""
        return len(self._offered) - len(self._added) + len(self._removed)

    def apply(self, events: Iterable[Event]) -> None:
        """Follow the pool. In order, each event once."""
        for event in events:
            if event.kind is EventKind.CLEARED:
                self._removed |= {hash_: None for hash_ in reversed(self._offered) if hash_ not in self._added}
                self._added.clear()
                self._offered.clear()
            elif event.hash is None:
                raise IntegrityError(f"{event} names no prefix")
            elif event.kind is EventKind.STORED:
                hash_ = short(event.hash)
                self._offered[hash_] = None
                _move(hash_, self._removed, self._added)
            else:
                hash_ = short(event.hash)
                self._offered.pop(hash_, None)
                _move(hash_, self._added, self._removed)

    def take(self) -> HeldChange:
        """The net change since the last one, to be written until ``settled``. Raises IntegrityError while another is
        in flight."""
        if self._in_flight is not None:
            raise IntegrityError("a change of the prefix index is in flight already")
        change = HeldChange(tuple(self._added), tuple(self._removed))
        self._added.clear()
        self._removed.clear()
        self._in_flight = change
        self._changes += 1
        if self._touched is not None:
            self._touched |= {*change.added, *change.removed}
        return change

    def settled(self, members: int | None) -> None:
        """Redis has the change that was in flight, and as many members as it says (None: it did not)."""
        self._in_flight = None
        self._changes += 1
        if members is not None and members != self.count:
            self._drift()

    def look(self) -> int:
        """To be called before Redis is asked for the number of members; what it returns belongs to ``seen``."""
        return self._changes

    def seen(self, look: int, members: int) -> None:
        """What Redis answered. Not judged when a change was in flight meanwhile: the answer may be from before it, or
        from after it."""
        if self._in_flight is None and look == self._changes and members != self.count:
            self._drift()

    def begin_audit(self) -> None:
        """To be called before the members are read, in whatever many calls."""
        change = self._in_flight
        self._touched = set() if change is None else {*change.added, *change.removed}

    def audited(self, members: AbstractSet[bytes]) -> None:
        """What was read. Members that came or went meanwhile are not judged."""
        touched, self._touched = self._touched, None
        if touched is None:
            return  # the whole set was written meanwhile
        shown = (self._offered.keys() - self._added.keys()) | self._removed.keys()
        if (shown ^ members) - touched:
            self._drift()

    def snapshot(self) -> tuple[bytes, ...]:
        """All that is offered, to be written in the place of what Redis has. With no change in flight."""
        if self._in_flight is not None:
            raise IntegrityError("a change of the prefix index is in flight")
        return tuple(self._offered)

    def replaced(self, snapshot: tuple[bytes, ...]) -> None:
        """Redis has just this, whatever it had before."""
        written = {*snapshot}
        self._added = {hash_: None for hash_ in self._offered if hash_ not in written}
        self._removed = {hash_: None for hash_ in reversed(snapshot) if hash_ not in self._offered}
        self._touched = None
        self._changes += 1
        self.drifted = False

    def _drift(self) -> None:
        self.drifts += not self.drifted
        self.drifted = True


def _move(hash_: bytes, undone: dict[bytes, None], done: dict[bytes, None]) -> None:
    """Note a change, or that it takes back one that Redis was never told of."""
    if hash_ in undone:
        del undone[hash_]
    else:
        done[hash_] = None
