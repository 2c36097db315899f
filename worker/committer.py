"""Hands what steps produced to Redis, in order, behind the steps' back."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvstore.errors import CommitGap, KvError
from kvstore.jobs import Commit, Jobs
from kvstore.outage import Outage
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

STEPS_AHEAD = 32
"""Steps whose output may wait for Redis before the engine does."""
RETRY_S = 0.2


class Committer:
    """A bounded line of deliveries. All that waits goes out in one call, so a slow Redis costs latency, not speed."""

    def __init__(
        self, jobs: Jobs, worker: str, incarnation: str, settled: Callable[[job_pb2.Delivery, Commit], None]
    ) -> None:
        """``settled`` is told what became of each delivery."""
        self._jobs = jobs
        self._worker = worker
        self._incarnation = incarnation
        self._settled = settled
        self._outage = Outage(logger, "committing")
        self._steps: asyncio.Queue[list[job_pb2.Delivery]] = asyncio.Queue(STEPS_AHEAD)
        self.unsettled = 0
        """Deliveries that Redis has not taken yet."""

    async def put(self, deliveries: list[job_pb2.Delivery]) -> None:
        """Queues one step's deliveries; waits while too many steps are queued."""
        if deliveries:
            self.unsettled += len(deliveries)
            await self._steps.put(deliveries)

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
            for delivery, outcome in zip(deliveries, await self._commit(deliveries), strict=True):
                self._settled(delivery, outcome)
            self.unsettled -= len(deliveries)
            for _ in steps:
                self._steps.task_done()

    async def _commit(self, deliveries: Sequence[job_pb2.Delivery]) -> list[Commit]:
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
                outcomes = iter((await self._jobs.commit(self._worker, self._incarnation, kept)).outcomes)
                self._outage.worked()
                return [Commit.FENCED if d.request_id in ended else next(outcomes) for d in deliveries]
            except CommitGap as gap:
                logger.error("%s", gap)
                gaps |= gap.expected.keys()
            except KvError as error:
                self._outage.failed(error)
                await asyncio.sleep(RETRY_S)

    async def _end(self, delivery: job_pb2.Delivery) -> None:
        await self._jobs.finish(
            delivery.request_id,
            finish=inference_pb2.ERROR,
            failure=job_pb2.FAILURE_UNAVAILABLE,
            error="the broker lost a part of this job's output",
            expect_attempt=delivery.attempt,
        )
