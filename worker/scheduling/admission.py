"""Who of the waiting sequences comes in next, on which blocks, and in whose place.

Nothing is changed here but notes about waiting sequences; the scheduler acts on the answer.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker.scheduling.block_pool import BlockPool
    from worker.scheduling.line import Announcements, Line
    from worker.scheduling.plan import Plan
    from worker.sequence import Sequence

MAX_DISPLACEMENTS = 2
"""How often a sequence may lose its place to one of a higher priority."""


class Admission(NamedTuple):
    """A waiting sequence may run."""

    sequence: Sequence
    hits: list[int]
    """Offered blocks that hold the start of its tokens. If they hold all, the last one has to be copied."""
    victims: list[Sequence]
    """Running sequences that have to give up their blocks first."""


class Waits(Enum):
    """Why a sequence can't come in now."""

    FOR_OTHERS = "for others"
    """Another one is computing its prefix, or the step gives no more scores. It may be passed."""
    FOR_ROOM = "for room"
    """It lacks a slot or blocks."""


class Blocked(NamedTuple):
    """The first of the line had no room."""

    sequence: Sequence
    returns: int
    """``BlockPool.returns`` then."""


class Admissions:
    """Reads the waiting line from its front.

    - A sequence comes in when there is a slot, and blocks for all its tokens, not only for those of its first step. So
      none is started that must stop half-way, and one that was preempted comes back only once others have ended.
    - One whose next full block is announced by a better standing waits until that is offered; one whose prompt is to
      be scored waits while others take all the scores of a step. Those behind may pass it if they leave a slot and
      blocks for it.
    - One that lacks a slot or blocks may take the place of running ones with a lower priority and a worse standing,
      worst standing first, if that gives it what it lacks; each loses its place so at most ``MAX_DISPLACEMENTS`` times.
    - Otherwise nobody passes it.
    """

    def __init__(
        self, pool: BlockPool, running: Line, waiting: Line, announcements: Announcements, max_running: int
    ) -> None:
        self._pool = pool
        self._running = running
        self._waiting = waiting
        self._announcements = announcements
        self._max_running = max_running
        self._blocked: Blocked | None = None

    def next(self, plan: Plan, before: Sequence | None) -> Admission | None:
        """The next one to come in, of those with a better standing than ``before``. Closes the plan if none can."""
        # Those that were passed over in this step are at the front, and stay there.
        while not plan.closed and plan.prompt_room > 0 and plan.passed < len(self._waiting):
            sequence = self._waiting[plan.passed]
            if before is not None and before.standing < sequence.standing:
                return None
            verdict = self._consider(sequence, plan)
            if isinstance(verdict, Admission):
                return verdict
            if verdict is Waits.FOR_ROOM:
                plan.closed = True
            else:
                plan.pass_over(sequence)
        return None

    def _consider(self, sequence: Sequence, plan: Plan) -> Admission | Waits:
        awaited = sequence.awaits
        if awaited is not None and self._announcements.to_await(awaited, sequence) and not self._pool.offers(awaited):
            return Waits.FOR_OTHERS
        sequence.awaits = None
        if self._blocked == (sequence, self._pool.returns):
            return Waits.FOR_ROOM  # while no block comes back there is only less and less
        missing_slots = len(self._running) + plan.passed + 1 - self._max_running
        if missing_slots > 0 and next(self._displaceable(sequence), None) is None:
            return Waits.FOR_ROOM
        usable = self._usable(sequence)
        hits = self._pool.match(sequence.root, sequence.hash_blocks(usable), sequence.tokens)
        if self._follows(sequence, len(hits), usable):
            return Waits.FOR_OTHERS
        if not plan.portion(sequence, min(len(hits) * sequence.block_size, sequence.num_tokens - 1)):
            sequence.own_blocks = sequence.blocks_for(sequence.num_tokens)
            return Waits.FOR_OTHERS
        room = self._pool.available - plan.owed
        if missing_slots <= 0:
            fitting = self._fit(sequence, hits, room)
            if fitting is not None:
                return Admission(sequence, fitting, [])
        admission = self._displace(sequence, hits, room, missing_slots)
        if admission is not None:
            return admission
        if not plan.passed:
            self._blocked = Blocked(sequence, self._pool.returns)
        return Waits.FOR_ROOM

    def _usable(self, sequence: Sequence) -> int:
        """How many of its first blocks may be hits.

        All full ones, for the last token is computed into a copy; but a block of one token is as soon computed. And not
        those that hold positions whose logits are wanted: these exist only for what is computed.
        """
        length = sequence.num_tokens
        usable = length // sequence.block_size if sequence.block_size > 1 else length - 1
        return min(usable, sequence.scored // sequence.block_size) if sequence.unscored else usable

    def _follows(self, sequence: Sequence, hits: int, usable: int) -> bool:
        """Whether it had better wait, as the block after its hits is being computed. Notes how far that goes."""
        end = hits
        while end < usable and self._announcements.to_await(sequence.hashes[end], sequence):
            end += 1
        if end == hits:
            return False
        sequence.awaits = sequence.hashes[end - 1]
        sequence.own_blocks = sequence.blocks_for(sequence.num_tokens) - end
        return True

    def _fit(self, sequence: Sequence, hits: list[int], room: int) -> list[int] | None:
        """The hits to come in on when there are ``room`` blocks to take; None when that is too little.

        If the hits hold all its tokens, the last one is held and copied, which takes one more; without room for that
        it is computed again.
        """
        if len(hits) * sequence.block_size == sequence.num_tokens:
            if self._taken(sequence, hits) + 1 <= room:
                return hits
            hits = hits[:-1]
        return hits if self._taken(sequence, hits) <= room else None

    def _taken(self, sequence: Sequence, hits: list[int]) -> int:
        """Available blocks that all its tokens take. Hits that somebody uses cost nothing."""
        used = sum([self._pool.refs(block) > 0 for block in hits])
        return sequence.blocks_for(sequence.num_tokens) - used

    def _displaceable(self, sequence: Sequence) -> Iterator[Sequence]:
        """Running sequences whose place it may take, worst standing first."""
        for victim in reversed(self._running):
            if victim.standing < sequence.standing:
                return
            if victim.request.priority < sequence.request.priority and victim.displacements < MAX_DISPLACEMENTS:
                yield victim

    def _displace(self, sequence: Sequence, hits: list[int], room: int, missing_slots: int) -> Admission | None:
        """Its admission in the place of others; None, when even all that it may displace have too little."""
        victims: list[Sequence] = []
        released: Counter[int] = Counter()
        for victim in self._displaceable(sequence):
            victims.append(victim)
            for block in victim.held():
                released[block] += 1
                # A hit is counted as used by the victim already, which is as good as available.
                room += released[block] == self._pool.refs(block) and block not in hits
            if len(victims) >= missing_slots and (fitting := self._fit(sequence, hits, room)) is not None:
                return Admission(sequence, fitting, victims)
        return None
