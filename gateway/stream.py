"""One call's way to a job's output: the doorbell's deliveries, and the token log for whatever the doorbell lost.

A stream reads its token log when the doorbell brought a gap, when its reader was slower than its buffer, after a lost
connection, and when it has heard nothing of some choice for a second: a lost last message leaves no gap.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Final

from gateway.errors import Draining, JobGone, JobLost, told
from gateway.place import Delivery, Offer, Place
from kvstore import token_log
from kvstore.entries import put_back
from kvstore.errors import BrokerAuth, BrokerError, BrokerWrongType
from kvstore.jobs import JobRecord, JobState
from kvstore.logs import note
from kvstore.records import MOST_TOKENS
from kvstore.submissions import new_caller
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType
    from typing import Self

    from gateway.relay import Relay
    from kvstore.client import Broker
    from kvstore.jobs import Jobs

SILENCE_S: Final = 1.0
"""A stream that has heard nothing of a choice for this long asks the broker."""
LISTED_S: Final = 3.0
"""While a stream hears nothing, it looks this often whether its job is still where its worker would find it."""
PATIENCE_S: Final = 30.0
"""A stream ends with UNAVAILABLE when the broker has not answered it for this long."""
CAPACITY: Final = 64
"""Deliveries a stream buffers for each choice. A slower reader is served from the log, which its buffer need not
hold."""
MAX_BATCH: Final = 64
"""Deliveries that ``Stream.next`` returns at once."""
CALL_AGAIN: Final = "the job may go on: call again with the same request_id and payload"


class Stream:
    """One call's way to a job's output: ``with relay.open(id, n) as stream``, submit, then ``await stream.next()``
    until ``stream.done``."""

    def __init__(
        self,
        relay: Relay,
        broker: Broker,
        jobs: Jobs,
        request_id: str,
        choices: int,
        after: Mapping[int, int],
        caller: str,
    ) -> None:
        self.request_id = request_id
        self.caller = new_caller(caller)
        """The call's name in the broker."""
        self.callers = {self.caller}
        """And those of calls that left the same job to this one. Under one of these the job may be ended."""
        self.attached = False
        """Set once the job is known to be in the broker for this stream, whose caller does not only look on."""
        self.restarts = 0
        """How often the broker has lost the job."""
        self.fingerprint = ""
        """Of the worker that gave what there is of its output; empty: not known."""
        self._relay = relay
        self._broker = broker
        self._jobs = jobs
        self._place = Place(choices=choices, capacity=CAPACITY * choices, after=after)
        self._heard = [time.monotonic()] * choices
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        """Wakes the reader when a choice may have been silent for too long. One that is set is left alone by what comes
        meanwhile: to set it anew for every token costs more than to wake once a second in vain."""
        self._log_id = b"0"
        self._trouble_since: float | None = None
        self._listed = time.monotonic()
        """When the job was last known to be in its worker's stream."""
        self._on_route: Callable[[inference_pb2.Route], None] | None = None

    def __enter__(self) -> Self:
        self._relay.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._relay.remove(self)
        if error is not None:
            note(error, self.request_id)

    @property
    def choices(self) -> int:
        """How many answers the job has."""
        return len(self._place.next)

    @property
    def ended(self) -> bool:
        """Whether the last terminal delivery has been read or is in the buffer."""
        return self._place.ended

    @property
    def done(self) -> bool:
        """Whether ``next`` has returned all there is."""
        return self._place.ended and not len(self._place)

    @property
    def begun(self) -> bool:
        """Whether its reader has some of the output, or is about to get it."""
        return any(self._place.next)

    @property
    def usage(self) -> inference_pb2.Usage:
        """Of the whole job, once the stream is done. Lives of the job that the broker has lost count as an attempt
        each; what they used was used in vain."""
        usage = inference_pb2.Usage()
        usage.CopyFrom(self._place.usage)
        usage.attempts += self.restarts
        return usage

    def offer(self, delivery: Delivery) -> Offer:
        """A delivery from the doorbell."""
        outcome = self._place.offer(delivery)
        self._tell_route()
        if outcome is Offer.TAKEN:
            self._heard[delivery.chunk.choice] = time.monotonic()
        if outcome in (Offer.TAKEN, Offer.LOG):
            self._wake.set()
        return outcome

    def heard(self, delivery: Delivery) -> float:
        """When something of the delivery's choice was heard last, on the monotonic clock."""
        return self._heard[delivery.chunk.choice]

    def distrust(self) -> None:
        """Something may have been missed: read the log."""
        self._place.stale = True
        self._wake.set()

    def restart(self) -> None:
        """The broker has lost the job, and it runs again from its first token under the same id: what of its output is
        had already is left out."""
        self._place.restart()
        self._on_route = None
        self._log_id = b"0"
        self._heard = [time.monotonic()] * len(self._heard)
        self.restarts += 1
        self._wake.set()

    def on_route(self, tell: Callable[[inference_pb2.Route], None]) -> None:
        """`tell` gets the route of the job's present life, once, as soon as its first delivery has come; now, if it
        has."""
        self._on_route = tell
        self._tell_route()

    def wake(self) -> None:
        """Lets a waiting reader look around."""
        self._wake.set()

    async def next(self) -> list[Delivery]:
        """The next 1 to MAX_BATCH deliveries, of each choice in index order; empty only when done.

        Raises JobGone when the broker has lost the job, JobDiffers when it was run anew with another answer, JobLost
        when the broker has lost its output or does not answer for PATIENCE_S, Draining when the relay was closed.
        """
        while True:
            if batch := self._place.take(MAX_BATCH):
                return batch
            if self._place.ended:
                return []
            if self._relay.closed:
                raise Draining(f"the gateway is stopping; {CALL_AGAIN}")
            self._wake.clear()
            if self._place.stale:
                await self._ask(self._refill)
            elif self._timer is None and not self._patient():
                await self._ask(self._compare)
            else:
                await self._wake.wait()

    def _patient(self) -> bool:
        """Sets the timer, unless a choice has been silent for too long already."""
        patience = min(self._heard[choice] for choice in self._place.open) + SILENCE_S - time.monotonic()
        if patience <= 0:
            return False
        self._timer = asyncio.get_running_loop().call_later(patience, self._look)
        return True

    def _look(self) -> None:
        self._timer = None
        self._wake.set()

    async def _ask(self, question: Callable[[], Awaitable[None]]) -> None:
        """Asks the broker, and bears with one that does not answer."""
        try:
            await question()
        except BrokerError as error:
            now = time.monotonic()
            self._trouble_since = self._trouble_since or now
            if now - self._trouble_since > PATIENCE_S:
                trouble = "refuses access" if isinstance(error, BrokerAuth) else "does not answer"
                raise JobLost(f"the broker {trouble}; {CALL_AGAIN}") from error
            # What the log has is unknown, so it stays to be read. The jitter keeps streams from asking in step.
            self._place.stale = True
            await self._relay.pause(random.uniform(0.2, 1.0))
        else:
            self._trouble_since = None
            self._heard = [time.monotonic()] * len(self._heard)

    async def _compare(self) -> None:
        """Some choice is silent: does the broker know more?"""
        record = await self._jobs.get(self.request_id)
        # Where there is none it may have been damaged, and ended just now: its log tells.
        if record is None or record.state is JobState.ENDED or self._place.behind(record.next, record.ends):
            await self._refill()
            if record is not None and record.state is JobState.ENDED and not (self._place.ended or self._place.stale):
                raise JobLost("the job has ended and its output is no longer kept")
        elif time.monotonic() - self._listed >= LISTED_S:
            await self._put_back(record)

    async def _put_back(self, record: JobRecord) -> None:
        """Where nobody would find the job it is put there again. Raises JobLost where that can't be done."""
        try:
            await put_back(self._broker, record)
        except BrokerWrongType as error:
            # Nothing passes there until somebody deletes the key: to wait in silence helps nobody.
            raise JobLost(told(error)) from error
        self._listed = time.monotonic()

    async def _refill(self) -> None:
        """Takes one page of the log. If there are more, they are read when the reader has taken what this one brought:
        the answers of a job may be far larger than a reader should cost."""
        self._relay.refills += 1
        # Before the read: what the doorbell brings meanwhile may make it stale anew.
        self._place.stale = False
        entries, self._log_id, more = await token_log.read_page(self._broker, self.request_id, self._log_id)
        self._relay.malformed += self._place.refill(entries)
        self._tell_route()
        if more:
            self._place.stale = not self._place.ended
        elif self._place.outside is not None:
            # Without the record the job has ended all the same, and only what it had used is not known.
            record = await self._jobs.get(self.request_id)
            self._place.complete(record.next if record else {}, usage_of(record) if record else inference_pb2.Usage())
        elif not entries:
            await self._record()

    def _tell_route(self) -> None:
        if self._on_route is not None and self._place.route is not None:
            tell, self._on_route = self._on_route, None
            tell(self._place.route)

    async def _record(self) -> JobRecord:
        record = await self._jobs.get(self.request_id)
        if record is None:
            raise JobGone("the job is no longer in the broker")
        return record


def usage_of(record: JobRecord) -> inference_pb2.Usage:
    """Usage of a job that was ended from outside its worker."""
    return inference_pb2.Usage(
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=min(sum(record.next.values()), MOST_TOKENS),  # each is bounded, their sum is not
        attempts=record.attempt,
    )
