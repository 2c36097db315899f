"""One reader's place in a job's output. Pure: deliveries in, deliveries out; ``relay`` does the I/O.

The doorbell brings deliveries at once but may lose some; the token log has them all. A place knows the next token index
of its job, so it can tell what is new, what it has seen and what is missing::

    offered:   [0..3) [3..4)         [5..6)     start 5, next 4: a gap -> stale, the log must be read
    log:       [0..3) [3..4) [4..5) [5..6)      refill: skips to 4, takes the rest
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from gateway.errors import JobLost
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    """Where one reader of a job with one choice is.

    ``stale`` says that the log must be read before the reader goes on. ``ended`` says that the last delivery is in the
    buffer or was taken. ``outside`` holds a terminal delivery that was written from outside the worker, and lacks its
    start and usage: ``complete`` fills them in.
    """

    def __init__(self, *, capacity: int) -> None:
        self.stale = False
        self.ended = False
        self.next = 0
        self.outside: Delivery | None = None
        self._capacity = capacity
        self._buffer: deque[Delivery] = deque()

    def __len__(self) -> int:
        return len(self._buffer)

    def offer(self, delivery: Delivery) -> Offer:
        """Takes a delivery from the doorbell, or says why not. Sets ``stale`` where the log is needed."""
        if self.ended or self.outside is not None:
            return Offer.SEEN
        if not well_formed(delivery):
            return Offer.MALFORMED
        if written_outside(delivery):
            # It does not say where it stands, so only the log can tell that nothing is missing before it.
            self.stale = True
            return Offer.LOG
        if delivery.chunk.start < self.next:
            return Offer.SEEN
        if self.stale or delivery.chunk.start > self.next or len(self._buffer) >= self._capacity:
            self.stale = True
            return Offer.LOG
        self._append(delivery)
        return Offer.TAKEN

    def refill(self, entries: Iterable[Delivery]) -> int:
        """Takes from consecutive log entries what is new; returns how many were malformed, and left out.

        May go over the capacity, by what one read of the log brings. Raises JobLost when the log itself has a gap.
        """
        malformed = 0
        for delivery in entries:
            if self.ended or self.outside is not None:
                break
            if not well_formed(delivery):
                malformed += 1
                continue
            if written_outside(delivery):
                self.outside = delivery
                break
            if delivery.chunk.start < self.next:
                continue
            if delivery.chunk.start > self.next:
                raise JobLost(f"the token log goes from index {self.next} to {delivery.chunk.start}")
            self._append(delivery)
        return malformed

    def complete(self, next_index: int, usage: inference_pb2.Usage) -> None:
        """Puts the terminal delivery from outside behind all others, with its start and usage."""
        if self.outside is None:
            return
        if next_index != self.next:
            raise JobLost(f"the job has {next_index} tokens and its token log {self.next}")
        done = Delivery()
        done.CopyFrom(self.outside)
        done.chunk.start = next_index
        done.usage.CopyFrom(usage)
        self.outside = None
        self._append(done)

    def take(self, limit: int) -> list[Delivery]:
        """Up to `limit` deliveries, in order. Empty: none are there now."""
        return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]

    def _append(self, delivery: Delivery) -> None:
        self._buffer.append(delivery)
        self.next += len(delivery.chunk.token_ids)
        self.ended = is_terminal(delivery)


def is_terminal(delivery: Delivery) -> bool:
    """Whether nothing comes after this delivery."""
    return delivery.chunk.finish != inference_pb2.FINISH_REASON_UNSPECIFIED


def written_outside(delivery: Delivery) -> bool:
    """Whether this ended a job from outside its worker: cancelled, timed out, or the worker died."""
    return is_terminal(delivery) and not delivery.HasField("usage")


def well_formed(delivery: Delivery) -> bool:
    """Whether a delivery is one that a worker or a finish may write. With no tokens and no end it could not be told
    from its own repeat."""
    chunk = delivery.chunk
    return delivery.HasField("chunk") and chunk.choice == 0 and (bool(chunk.token_ids) or is_terminal(delivery))
