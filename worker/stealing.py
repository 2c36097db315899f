"""Jobs move from a worker that can't read them yet to one that has room.

::

    full worker:   jobs wait in its stream --call, every CALL_EVERY_S--> all workers with the same pages
    free worker:   hears calls --peek, where the wait is longest--> what it holds of each prompt (``worker.overlap``)
                         --steal--> the job is in its own stream, and read as any other

What is free: a place, and no job that waits for its first token. Nobody asks while nobody calls, so an idle fleet
costs nothing. Whether a job is sooner done here, the cached prefixes at both considered, is judged by ``Jobs.steal`` in
the moment of the move; here it is only decided whom to ask, and found out what is held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from kvstore.errors import KvError
from kvstore.help import Call, HelpLine
from kvstore.jobs import Jobs
from kvstore.outage import Outage
from kvstore.stealing import peek
from worker.overlap import HASHED_AT_ONCE, Overlaps

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from collections.abc import Set as AbstractSet

    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo
    from worker.intake import Intake
    from worker.rates import Measured, Rates

logger = logging.getLogger(__name__)

CALL_EVERY_S: Final = 0.2
FRESH_S: Final = 0.5
"""A call is not believed for longer: it would have been repeated."""
MARGIN_S: Final = 0.1
"""A job is taken if it has its first token sooner by more than that, which moving it may cost."""
REFUSED_S: Final = 0.05
"""A pause after one that had nothing: where many call in vain, all that are free would ask them all, all the time."""
ARRIVAL_S: Final = 2.0
"""A job that was taken has come by then."""
FIRST_ANSWER: Final = 64.0
"""Tokens of a job's answers, before any has ended here."""
ANSWERS: Final = 32
"""Ended jobs after which an older one counts a third, at most."""


def place_s(rates: Measured, max_running: int, answer_tokens: float) -> float:
    """Seconds until one more of a full batch's places becomes free, if jobs have so many tokens."""
    step_ms = rates.step_ms + rates.sequence_ms * (max_running - 1)
    return answer_tokens * step_ms / 1000 / max_running


class Calls:
    """Who has called lately. Pure; times are of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Call, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._heard)

    def heard(self, call: Call, now: float) -> None:
        """A worker calls, maybe again."""
        self._heard[call.worker] = (call, now)

    def answered(self, worker: str) -> None:
        """There is nothing to be had, until it calls again."""
        self._heard.pop(worker, None)

    def longest(self, now: float) -> Call | None:
        """Whose jobs wait longest. Calls that are not fresh are forgotten."""
        self._heard = {worker: each for worker, each in self._heard.items() if now - each[1] <= FRESH_S}
        calls = [call for call, _ in self._heard.values()]
        return max(calls, key=lambda call: (call.wait_s, call.worker), default=None)


class Stealing:
    """One worker's part in it, as a full and as a free one."""

    def __init__(
        self,
        broker: Broker,
        info: WorkerInfo,
        intake: Intake,
        rates: Rates,
        free: Callable[[], bool],
        stolen: Callable[[], None],
        offered: AbstractSet[bytes] = frozenset(),
    ) -> None:
        """``free`` tells whether another's job could begin here now; ``stolen`` is told of each that was taken;
        ``offered`` is what the pool offers (``Held.offered``): without it, nothing is expected to be found."""
        self._broker = broker
        self._jobs = Jobs(broker)
        self._line = HelpLine(broker, info.fingerprint)
        self._overlaps = Overlaps(info.fingerprint, info.block_size, offered)
        self._info = info
        self._intake = intake
        self._rates = rates
        self._free = free
        self._stolen = stolen
        self._calls = Calls()
        self._answer_tokens = FIRST_ANSWER
        self._wake = asyncio.Event()
        self._arrived = asyncio.Event()

    async def open(self) -> None:
        """Hears calls from now on. Raises BrokerError."""
        await self._line.open()

    async def close(self) -> None:
        await self._line.close()

    def parts(self) -> dict[str, Coroutine[None, None, None]]:
        """What is to run all the time, by name. None of it returns."""
        return {"calls": self._call(), "help": self._listen(), "thief": self._steal()}

    def arrived(self) -> None:
        """A job has come."""
        self._arrived.set()

    def ended(self, tokens: int) -> None:
        """A job has ended with so many tokens."""
        self._answer_tokens += (tokens - self._answer_tokens) / ANSWERS

    def look(self) -> None:
        """To be called when this worker may have become free."""
        if self._calls:
            self._wake.set()

    async def _call(self) -> None:
        outage = Outage(logger, "calling for help")
        while True:
            await self._intake.full.wait()
            try:
                unread, load = await self._line.unread(self._info.id, self._info.incarnation)
                if unread:
                    now = self._rates.now
                    place = place_s(now, self._info.max_running, self._answer_tokens)
                    await self._line.call(Call(self._info.id, load.prefill / now.prefill_tok_s, place))
            except KvError as error:
                outage.failed(error)
            else:
                outage.worked()
            await asyncio.sleep(CALL_EVERY_S)

    async def _listen(self) -> None:
        async for call in self._line.calls():
            if call.worker != self._info.id:
                self._calls.heard(call, time.monotonic())
                self._wake.set()

    async def _steal(self) -> None:
        outage = Outage(logger, "taking jobs from others")
        while True:
            await self._wake.wait()
            self._wake.clear()
            call = self._calls.longest(time.monotonic())
            if call is None or not self._free():
                continue
            self._arrived.clear()
            try:
                moved = await self._take(call)
            except KvError as error:
                outage.failed(error)
                self._calls.answered(call.worker)
                continue
            outage.worked()
            if moved:
                self._stolen()
                await self._arrival()
            else:
                self._calls.answered(call.worker)
                await asyncio.sleep(REFUSED_S)
                self._wake.set()  # there may be others

    async def _take(self, call: Call) -> bool:
        held = await self._held_of(call.worker)
        if not self._free():
            return False  # the look took its time
        moved = await self._jobs.steal(
            self._info.id,
            self._info.incarnation,
            call.worker,
            prefill_s_per_token=1 / self._rates.now.prefill_tok_s,
            place_s=call.place_s,
            margin_s=MARGIN_S,
            held=held,
        )
        if moved:
            self._overlaps.forget()
        return bool(moved)

    async def _held_of(self, victim: str) -> Sequence[tuple[str, int]]:
        """Of which of the jobs that wait there this worker holds something, and how many tokens."""
        overlaps, now = self._overlaps, time.monotonic()
        if not overlaps:
            return ()
        known = overlaps.known(victim, now)
        waiting = await peek(self._broker, victim, known=known)
        if sum(len(each.job.prompt_token_ids) for each in waiting) > HASHED_AT_ONCE:
            found = await asyncio.to_thread(overlaps.look, waiting)
        else:
            found = overlaps.look(waiting)
        overlaps.note(victim, found, now)
        return [(entry, tokens) for entry, tokens in (known | found).items() if tokens]

    async def _arrival(self) -> None:
        """Until the job that was taken is here, so that it is seen that this worker is free no more."""
        try:
            async with asyncio.timeout(ARRIVAL_S):
                await self._arrived.wait()
        except TimeoutError:
            logger.warning(
                "a job that was taken from another worker has not been read in %g s; it waits in this one's stream",
                ARRIVAL_S,
            )
