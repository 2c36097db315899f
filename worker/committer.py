"""Hands what steps produced to Redis, in order, behind the steps' back: deliveries, and changes of the prefix index.

Nobody else writes the prefix index, so that a change is never lost between another's reading and writing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvstore.errors import CommitGap, KvError
from kvstore.jobs import Commit, Jobs
from kvstore.logs import about
from kvstore.outage import Outage, Refusals
from octavo.v1 import inference_pb2, job_pb2
from worker.past import RolledBack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.prefix_index import HeldChange, PrefixIndex
    from worker.held import Held

    Told = tuple[job_pb2.Delivery, str]
    """Of a job, with the entry by which it was claimed."""

logger = logging.getLogger(__name__)

STEPS_AHEAD = 32
"""Steps whose output may wait for Redis before the engine does."""
RETRY_S = 0.2
MEND_EVERY_S = 0.5
"""The index is written anew no more often than that, whatever becomes of it."""


class Committer:
    """A bounded line of deliveries. All that waits goes out in one call, so a slow Redis costs latency, not speed.

    What the pool began or ceased to offer meanwhile goes along.
    """

    def __init__(
        self,
        jobs: Jobs,
        index: PrefixIndex,
        held: Held,
        worker: str,
        incarnation: str,
        settled: Callable[[job_pb2.Delivery, str, Commit], None],
        roll_back: Callable[[str, int, str, Mapping[int, int]], RolledBack],
        entry_of: Callable[[str], str],
    ) -> None:
        """``settled`` is told what became of each delivery, with its job's entry, but of those that were taken back.

        ``roll_back`` is told of a job of which Redis has lost something: its id, the attempt, its entry, and how many
        tokens some of its choices have there. It says what becomes of the job. ``entry_of`` is told of a job whose
        deliveries are put into the line, and says by which entry it was claimed: by the time of the commit the id may
        be another's.
        """
        self._jobs = jobs
        self._index = index
        self._held = held
        self._worker = worker
        self._incarnation = incarnation
        self._settled = settled
        self._roll_back = roll_back
        self._entry_of = entry_of
        self._outage = Outage(logger, "committing")
        self._index_outage = Outage(logger, "mending the prefix index")
        self._mend_due = 0.0
        self._steps: asyncio.Queue[list[Told]] = asyncio.Queue()
        self._put = self._taken = 0
        """Steps that were ever put into the line, and taken out of it."""
        self._room = asyncio.Event()
        self._taken_back: dict[tuple[str, str], int] = {}
        """By id and entry, of jobs that go on from what Redis has: up to which step deliveries are of what it lost."""
        self.unsettled = 0
        """Deliveries that Redis has not taken yet."""

    async def put(self, deliveries: list[job_pb2.Delivery]) -> None:
        """Queues one step's deliveries, at once; then waits while too many steps are queued. To be called without any
        too."""
        if not deliveries:
            self.publish()
            return
        self.unsettled += len(deliveries)
        self._append([(each, self._entry_of(each.request_id)) for each in deliveries])
        while self._steps.qsize() > STEPS_AHEAD:
            self._room.clear()
            await self._room.wait()

    def publish(self) -> None:
        """What the index is to show goes out, with or without deliveries. After drift was found, to be called until it
        is mended."""
        if self._held.pending and self._steps.empty():
            self._append([])

    def _append(self, step: list[Told]) -> None:
        self._put += 1
        self._steps.put_nowait(step)

    async def flushed(self) -> None:
        """Returns once Redis has taken everything."""
        await self._steps.join()

    async def run(self) -> None:
        """Never returns. Raises BrokerAuth where Redis refuses for long what is to be written: then jobs get nowhere
        here, and maybe at another worker, whose user may more."""
        while True:
            steps = [await self._steps.get()]
            while not self._steps.empty():
                steps.append(self._steps.get_nowait())
            self._room.set()
            told = self._current(steps)
            await self._mend()
            for (delivery, entry), outcome in zip(told, await self._commit(told, self._held.take()), strict=True):
                if outcome is not None:
                    self._settled(delivery, entry, outcome)
            for step in steps:
                self.unsettled -= len(step)
                self._steps.task_done()

    def _current(self, steps: Sequence[list[Told]]) -> list[Told]:
        """What is to be committed of these steps, the next in the line."""
        kept: list[Told] = []
        for step in steps:
            self._taken += 1
            kept += [each for each in step if self._taken > self._taken_back.get(job_of(each), 0)]
        self._taken_back = {job: last for job, last in self._taken_back.items() if last > self._taken}
        return kept

    async def _mend(self) -> None:
        """Writes the index anew if Redis was found to have another.

        Whatever makes that fail must not hold up deliveries: it is tried once, and again with a later commit.
        """
        if not self._held.drifted or time.monotonic() < self._mend_due:
            return
        self._mend_due = time.monotonic() + MEND_EVERY_S
        snapshot = self._held.snapshot()
        try:
            await self._index.replace(self._worker, self._incarnation, snapshot)
        except KvError as error:
            self._index_outage.failed(error)
        else:
            self._index_outage.worked()
            self._held.replaced(snapshot)
            logger.warning("the prefix index was not what the pool offers: written anew, %d blocks", len(snapshot))

    async def _commit(self, told: Sequence[Told], change: HeldChange) -> list[Commit | None]:
        """Commits until Redis has taken it. Repeating is safe: what was written already comes back as DUPLICATE.

        A job whose log lacks tokens that were committed before (Redis has lost a part of its data) goes on from what is
        there, or at another worker, for which these deliveries are nothing: None. One that has lost something too often
        is ended. The others are committed again, for their outcomes.
        """
        lost: dict[tuple[str, str], Commit | None] = {}
        refusals = Refusals()
        while True:
            kept = [each for each in told if job_of(each) not in lost]
            deliveries, entries = [each for each, _ in kept], [entry for _, entry in kept]
            try:
                committed = await self._jobs.commit(self._worker, self._incarnation, deliveries, change, entries)
            except CommitGap as gap:
                for request_id, known in gap.expected.items():
                    logger.error(
                        "job %s: the broker lacks tokens that were committed; by choice it has those before %s",
                        *(request_id, known),
                        extra=about(request_id),
                    )
                    # Of several jobs with this id Redis has the last; all else is refused.
                    last = [each for each in kept if each[0].request_id == request_id][-1]
                    lost[job_of(last)] = await self._lost(last, known)
            except KvError as error:
                if refusals.last(error):
                    raise
                self._outage.failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._outage.worked()
                self._held.settled(committed.held_count)
                if time.monotonic() >= self._mend_due:
                    self.publish()
                outcomes = iter(committed.outcomes)
                return [lost[job_of(each)] if job_of(each) in lost else next(outcomes) for each in told]

    async def _lost(self, told: Told, known: Mapping[int, int]) -> Commit | None:
        request_id, attempt = told[0].request_id, told[0].attempt
        outcome = self._roll_back(request_id, attempt, told[1], known)
        if outcome is RolledBack.GOES_ON:
            self._taken_back[job_of(told)] = self._put
        if outcome is not RolledBack.TOO_OFTEN:
            return None
        refusals = Refusals()
        while True:
            try:
                await self._end(request_id, attempt)
            except KvError as error:
                if refusals.last(error):
                    raise
                self._outage.failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                return Commit.FENCED

    async def _end(self, request_id: str, attempt: int) -> None:
        await self._jobs.finish(
            request_id,
            finish=inference_pb2.ERROR,
            failure=job_pb2.FAILURE_UNAVAILABLE,
            error="the broker lost a part of this job's output",
            expect_attempt=attempt,
        )


def job_of(told: Told) -> tuple[str, str]:
    """The job of a delivery, by id and entry: ids may be submitted anew."""
    return told[0].request_id, told[1]
