"""One reader's place in a job's output. Pure: deliveries in, deliveries out; ``stream`` does the I/O.

The doorbell brings deliveries at once but may lose some; the token log has them all. A place knows the next token index
of each choice of its job, so it can tell what is new, what it has seen and what is missing. For one choice::

    offered:   [0..3) [3..4)         [5..6)     start 5, next 4: a gap -> stale, the log must be read
    log:       [0..3) [3..4) [4..5) [5..6)      refill: skips to 4, takes the rest

A reader may begin in the middle, with what it has from another gateway; and the log may come to lack what was read from
it, when the broker loses its last second or all of it: then the job runs again, and the same tokens come once more.
Each is compared with the one that came before: a worker of another kind may give others, and two answers must not
become one.
"""

from __future__ import annotations

from array import array
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from gateway.errors import JobDiffers, JobLost
from gateway.responses import BY_ITSELF
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

Delivery = job_pb2.Delivery


class Offer(Enum):
    """What became of a delivery from the doorbell."""

    TAKEN = "taken"
    SEEN = "seen"
    """It is not new."""
    LOG = "log"
    """Only the log can tell: there is a gap before it, no room for it, or it was written from outside."""
    MALFORMED = "malformed"


class Place:
    """Where one reader of a job is: the next token index of every choice, and which choices have ended.

    ``stale`` says that the log must be read before the reader goes on, whichever choice it is that lacks something: one
    read brings what all of them have. ``outside`` holds a terminal delivery that was written from outside the worker.
    It ends every choice that is still open, and lacks their starts and the usage: ``complete`` makes of it one terminal
    delivery for each.
    """

    def __init__(self, *, choices: int, capacity: int, after: Mapping[int, int] | None = None) -> None:
        """`after`: the next token index of the choices of which the reader has tokens already."""
        self.stale = False
        self.next = [(after or {}).get(choice, 0) for choice in range(choices)]
        self._told = [array("I") for _ in range(choices)]
        """Of each choice: the tokens before `next`, less those that the reader has from elsewhere."""
        self._here = [0] * choices
        """Of each choice: the next token index of the job's present life. Nothing before it was left out."""
        self.outside: Delivery | None = None
        self.usage = inference_pb2.Usage()
        """What the job has used, as far as terminal deliveries have told."""
        self._open = set(range(choices))
        self._begun = any(self.next)
        """The reader has the route."""
        self.route: inference_pb2.Route | None = None
        """Of the job's present life, once its first delivery was seen, whether or not its reader has it already."""
        self._capacity = capacity
        self._buffer: deque[Delivery] = deque()

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def open(self) -> AbstractSet[int]:
        """The choices whose last delivery is neither in the buffer nor was taken."""
        return self._open

    @property
    def ended(self) -> bool:
        """Whether no choice is open: what is still to be taken is in the buffer."""
        return not self._open

    def offer(self, delivery: Delivery) -> Offer:
        """Takes a delivery from the doorbell, or says why not. Sets ``stale`` where the log is needed."""
        if self.ended or self.outside is not None:
            return Offer.SEEN
        if not well_formed(delivery, len(self.next)):
            return Offer.MALFORMED
        if written_outside(delivery):
            # It does not say where it stands, so only the log can tell that nothing is missing before it.
            self.stale = True
            return Offer.LOG
        if not self.stale:  # else it may be of a life that is over
            self._note(delivery)
        choice, start = delivery.chunk.choice, delivery.chunk.start
        if choice not in self._open:
            return Offer.SEEN
        # What differs may be of a life that is over: the log knows which one is not.
        in_order = start <= self._here[choice] and self._agrees(delivery)
        new = self._new_part(delivery) if in_order else delivery
        if new is None:
            return Offer.SEEN
        # The route comes with a job's first delivery, whichever choice that is of.
        is_next = in_order and (self._begun or new.HasField("route")) and new.chunk.start == self.next[choice]
        if self.stale or not is_next or len(self._buffer) >= self._capacity:
            self.stale = True
            return Offer.LOG
        self._append(new)
        return Offer.TAKEN

    def refill(self, entries: Iterable[Delivery]) -> int:
        """Takes from consecutive log entries what is new; returns how many were malformed, and left out.

        May go over the capacity, by what one read of the log brings. Raises JobLost when the log itself has a gap,
        JobDiffers when it has another answer than the reader.
        """
        malformed = 0
        for delivery in entries:
            if self.ended or self.outside is not None:
                break
            if not well_formed(delivery, len(self.next)):
                malformed += 1
                continue
            if written_outside(delivery):
                self.outside = delivery
                break
            self._note(delivery)
            chunk = delivery.chunk
            if chunk.choice not in self._open:
                continue
            expected = self._here[chunk.choice]
            if chunk.start > expected:
                raise JobLost(f"the token log of choice {chunk.choice} goes from index {expected} to {chunk.start}")
            if not self._agrees(delivery):
                raise JobDiffers(f"choice {chunk.choice} of the job was run anew, and gave another answer")
            if (new := self._new_part(delivery)) is not None:
                self._append(new)
        return malformed

    def complete(self, next_indexes: Mapping[int, int], usage: inference_pb2.Usage) -> None:
        """Puts the end from outside behind all other deliveries: one for each open choice, with its start."""
        if self.outside is None:
            return
        expected = [next_indexes.get(choice, 0) for choice in range(len(self.next))]
        # The reader may have more than is committed: the broker has lost something.
        if any(committed > index for committed, index in zip(expected, self.next, strict=True)):
            raise JobLost(f"the choices of the job have {expected} tokens and its token log {self.next}")
        for choice in sorted(self._open):
            done = _copied(self.outside)
            done.chunk.choice, done.chunk.start = choice, self.next[choice]
            self._append(done)
        self.usage = usage
        self.outside = None

    def restart(self) -> None:
        """The job runs again from its first token, and its log begins anew."""
        self.outside = self.route = None
        self._here = [0] * len(self._here)
        self.stale = not self.ended

    def behind(self, next_indexes: Mapping[int, int], ends: Iterable[int]) -> bool:
        """Whether a job of which so much is committed, and these choices have ended, has more than was taken."""
        return any(next_indexes.get(choice, 0) > index for choice, index in enumerate(self.next)) or any(
            choice in self._open for choice in ends
        )

    def take(self, limit: int) -> list[Delivery]:
        """Up to `limit` deliveries, in order. Empty: none are there now."""
        return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]

    def _note(self, delivery: Delivery) -> None:
        if self.route is None and delivery.HasField("route"):
            self.route = delivery.route

    def _agrees(self, delivery: Delivery) -> bool:
        """Whether a delivery has the tokens that its reader has already."""
        chunk = delivery.chunk
        start, told, had = chunk.start, self._told[chunk.choice], self.next[chunk.choice]
        end = start + len(chunk.token_ids)
        # By itself an answer ends where it ended; from outside, it may be ended before it has got there again.
        if end < had and chunk.finish in BY_ITSELF:
            return False
        base = had - len(told)
        first, last = max(start, base), min(end, had)
        if first >= last:
            return True
        return told[first - base : last - base].tolist() == chunk.token_ids[first - start : last - start]

    def _new_part(self, delivery: Delivery) -> Delivery | None:
        """What the reader lacks of a delivery of an open choice. An end is news, whatever tokens come with it."""
        chunk = delivery.chunk
        known = self.next[chunk.choice] - chunk.start
        if known <= 0:
            return delivery
        if known < len(chunk.token_ids) or is_terminal(delivery):
            return _without(delivery, known)
        self._here[chunk.choice] = max(self._here[chunk.choice], chunk.start + len(chunk.token_ids))
        return None

    def _append(self, delivery: Delivery) -> None:
        if self._begun and delivery.HasField("route"):
            # Of a later life of the job: the reader has been told one.
            delivery = _copied(delivery)
            delivery.ClearField("route")
        self._begun = True
        self._buffer.append(delivery)
        choice, tokens = delivery.chunk.choice, delivery.chunk.token_ids
        self._told[choice].extend(tokens)
        self.next[choice] += len(tokens)
        self._here[choice] = self.next[choice]
        if is_terminal(delivery):
            self._open.discard(choice)
        # Each says what was used until then, and a reader need not get them in the order in which they were written.
        if delivery.HasField("usage") and delivery.usage.completion_tokens >= self.usage.completion_tokens:
            self.usage = delivery.usage


def is_terminal(delivery: Delivery) -> bool:
    """Whether nothing comes after this delivery for its choice."""
    return delivery.chunk.finish != inference_pb2.FINISH_REASON_UNSPECIFIED


def written_outside(delivery: Delivery) -> bool:
    """Whether this ended a job from outside its worker: cancelled, timed out, or the worker died."""
    return is_terminal(delivery) and not delivery.HasField("usage")


def well_formed(delivery: Delivery, choices: int) -> bool:
    """Whether a delivery is one that a worker or a finish may write. With no tokens and no end it could not be told
    from its own repeat."""
    chunk = delivery.chunk
    return delivery.HasField("chunk") and chunk.choice < choices and (bool(chunk.token_ids) or is_terminal(delivery))


def _copied(delivery: Delivery) -> Delivery:
    """What readers are handed is shared among all who wait for the job."""
    copy = Delivery()
    copy.CopyFrom(delivery)
    return copy


def _without(delivery: Delivery, known: int) -> Delivery:
    """A delivery without its first `known` tokens, which its reader has; it may have more than these. The text is that
    of all its tokens together: whole, unless the reader has had all of it."""
    rest = _copied(delivery)
    rest.ClearField("route")
    chunk = rest.chunk
    if known >= len(chunk.token_ids):
        chunk.text = ""
    chunk.start += known
    del chunk.token_ids[:known], chunk.logprobs[:known]
    chunk.ClearField("prompt_logprobs")
    return rest
