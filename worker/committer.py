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
from kvstore.outage import Outage
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.prefix_index import HeldChange, PrefixIndex
    from worker.held import Held

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
        settled: Callable[[job_pb2.Delivery, Commit], None],
    ) -> None:
        """``settled`` is told what became of each delivery."""
        self._jobs = jobs
        self._index = index
        self._held = held
        self._worker = worker
        self._incarnation = incarnation
        self._settled = settled
        self._outage = Outage(logger, "committing")
        self._index_outage = Outage(logger, "mending the prefix index")
        self._mend_due = 0.0
        self._steps: asyncio.Queue[list[job_pb2.Delivery]] = asyncio.Queue(STEPS_AHEAD)
        self.unsettled = 0
        """Deliveries that Redis has not taken yet."""

    async def put(self, deliveries: list[job_pb2.Delivery]) -> None:
        """Queues one step's deliveries; waits while too many steps are queued. To be called without any too."""
        if deliveries:
            self.unsettled += len(deliveries)
            await self._steps.put(deliveries)
        else:
            self.publish()

    def publish(self) -> None:
        """What the index is to show goes out, with or without deliveries. After drift was found, to be called until it
        is mended."""
        if self._held.pending and self._steps.empty():
            self._steps.put_nowait([])

    async def flushed(self) -> None:
        """Returns once Redis has taken everything."""
        await self._steps.join()

    async def run(self) -> None:
        """Never returns."""
        while True:
            steps = [await self._steps.get()]
            while not self._steps.empty():
                steps.append(self._steps.get_nowait())
            deliveries = [delivery for step in steps for delivery in step]
            await self._mend()
            for delivery, outcome in zip(deliveries, await self._commit(deliveries, self._held.take()), strict=True):
                self._settled(delivery, outcome)
            self.unsettled -= len(deliveries)
            for _ in steps:
                self._steps.task_done()

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

    async def _commit(self, deliveries: Sequence[job_pb2.Delivery], change: HeldChange) -> list[Commit]:
        """Commits until Redis has taken it. Repeating is safe: what was written already comes back as DUPLICATE.

        A job whose log lacks tokens that were committed before (Redis has lost a part of its data) is ended; the others
        are committed again, for their outcomes.
        """
        gaps: set[str] = set()
        ended: set[str] = set()
        while True:
            try:
                for delivery in deliveries:
                    if delivery.request_id in gaps - ended:
                        await self._end(delivery)
                        ended.add(delivery.request_id)
                kept = [delivery for delivery in deliveries if delivery.request_id not in ended]
                committed = await self._jobs.commit(self._worker, self._incarnation, kept, change)
            except CommitGap as gap:
                logger.error("%s", gap)
                gaps |= gap.expected.keys()
            except KvError as error:
                self._outage.failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._outage.worked()
                self._held.settled(committed.held_count)
                if time.monotonic() >= self._mend_due:
                    self.publish()
                outcomes = iter(committed.outcomes)
                return [Commit.FENCED if d.request_id in ended else next(outcomes) for d in deliveries]

    async def _end(self, delivery: job_pb2.Delivery) -> None:
        await self._jobs.finish(
            delivery.request_id,
            finish=inference_pb2.ERROR,
            failure=job_pb2.FAILURE_UNAVAILABLE,
            error="the broker lost a part of this job's output",
            expect_attempt=delivery.attempt,
        )
