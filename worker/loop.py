"""The shell around the engine: claims jobs from Redis, drives steps, commits what they produced.

    intake ──claims──▶ inbox ─┐                               ┌─▶ committer ──▶ Redis
    doorbell ─ended elsewhere─┼─▶ (between steps) engine.step ─┤
    deadlines, dead gateways ─┘        in its own thread       └─▶ at most COMMITS_AHEAD steps wait there

The engine never waits for Redis: the commit of a step overlaps the next step. Only when commits fall behind (a slow or
absent Redis) does the next step wait, so that what is buffered stays bounded. The engine is touched between steps and
by the step's thread, never by both at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.doorbell import RECONNECTED, Doorbell
from kvstore.errors import CommitGap, KvError
from kvstore.jobs import Claim, Commit, Jobs, JobState
from octavo.v1 import inference_pb2, job_pb2
from worker.engine import AdmissionError, Engine
from worker.heartbeat import Heartbeat
from worker.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Broker
    from kvstore.entries import Entry
    from kvstore.registry import ModelCard, WorkerInfo
    from worker.config import WorkerConfig
    from worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

COMMITS_AHEAD = 2
"""Steps whose output may wait for Redis before the engine does."""
BLOCK_MS = 500
"""How long one read of the worker's stream blocks; also how soon a drain is noticed."""
RETRY_S = 0.2
ORPHAN_GRACE_S = 10.0
"""How long a job goes on when its gateway has died."""


class WorkerLoop:
    """Runs one worker until it is drained or fails."""

    def __init__(
        self,
        config: WorkerConfig,
        broker: Broker,
        engine: Engine,
        info: WorkerInfo,
        card: ModelCard,
        metrics: WorkerMetrics,
    ) -> None:
        self._config = config
        self._broker = broker
        self._engine = engine
        self._info = info
        self._metrics = metrics
        self._jobs = Jobs(broker)
        self._reader = broker.blocking()
        self._journal = Journal(config.id)
        self._heartbeat = Heartbeat(broker, info, card, self._journal, engine.stats, ORPHAN_GRACE_S)
        self._inbox: list[Claim] = []
        self._dropped: set[str] = set()
        self._commits: asyncio.Queue[list[job_pb2.Delivery]] = asyncio.Queue(COMMITS_AHEAD)
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._draining = asyncio.Event()
        self._drained_by: float | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def drain(self) -> None:
        """Takes no routed work any more, ends what is there within the grace time, then `run` returns."""
        if not self._draining.is_set():
            logger.info("draining: %d running", len(self._journal.running))
            self._drained_by = time.monotonic() + self._config.grace
            self._draining.set()
            self._heartbeat.drain()
            self._wake.set()

    async def run(self) -> None:
        """Serves until drained. Raises `LeaseLostError`, or whatever broke a part that can't go on without it."""
        committer = asyncio.create_task(self._committer(), name="committer")
        services = [
            asyncio.create_task(self._heartbeat.run(), name="heartbeat"),
            asyncio.create_task(self._intake(), name="intake"),
            asyncio.create_task(self._doorbell(), name="doorbell"),
        ]
        stepper = asyncio.create_task(self._stepper(), name="stepper")
        try:
            await asyncio.wait([stepper, committer, *services], return_when=asyncio.FIRST_COMPLETED)
            for task in (stepper, committer, *services):
                if task.done():
                    task.result()
            await self._flush(committer)
        finally:
            for task in (stepper, committer, *services):
                task.cancel()
            await asyncio.gather(stepper, committer, *services, return_exceptions=True)
            self._thread.shutdown(wait=True)
            await self._reader.aclose()
            await self._heartbeat.leave()

    async def _flush(self, committer: asyncio.Task[None]) -> None:
        """Waits until all output has reached Redis, but not beyond the grace time."""
        flushed = asyncio.create_task(self._commits.join())
        await asyncio.wait([flushed, committer], timeout=self._config.grace, return_when=asyncio.FIRST_COMPLETED)
        flushed.cancel()

    # Steps

    async def _stepper(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._apply_changes()
            if not self._engine.has_work:
                self._publish_stats()
                if self._draining.is_set() and await self._nothing_left():
                    return
                await self._wait_for_work()
                continue
            started = time.monotonic()
            step = await loop.run_in_executor(self._thread, self._engine.step)
            now = time.monotonic()
            self._metrics.step(step.stats, now - started)
            for failure in step.failures:
                logger.error("a step failed", exc_info=failure)
            self._publish_stats()
            deliveries = [d for o in step.outputs if (d := self._journal.record(o, now)) is not None]
            await self._hand_over(deliveries)

    async def _wait_for_work(self) -> None:
        timeout = BLOCK_MS / 1000 if self._draining.is_set() else None
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _nothing_left(self) -> bool:
        """Whether a draining worker may go: no job here, and none routed here in the meantime."""
        if self._inbox or self._journal.running:
            return False
        if self._drained_by is not None and time.monotonic() >= self._drained_by:
            return True
        try:
            queues = await self._jobs.queues()
        except KvError:
            return False
        mine = [q for q in queues if q.worker == self._config.id]
        return self._commits.empty() and all(q.undelivered + q.pending == 0 for q in mine)

    async def _apply_changes(self) -> None:
        """Everything that must not happen during a step: new jobs, jobs ended elsewhere, deadlines, the drain's end."""
        failed: list[job_pb2.Delivery] = []
        now = time.monotonic()
        for request_id in self._dropped:
            if self._journal.drop(request_id) is not None:
                self._engine.abort(request_id)
                self._metrics.jobs.labels("dropped").inc()
        self._dropped.clear()
        inbox, self._inbox = self._inbox, []
        for claim in inbox:
            failed += self._admit(claim, now)
        for request_id in self._journal.expired(now):
            failed += self._fail(
                request_id, job_pb2.FAILURE_DEADLINE, "the deadline passed while the worker ran the job"
            )
        if self._drained_by is not None and now >= self._drained_by:
            for request_id in list(self._journal.running):
                failed += self._fail(request_id, job_pb2.FAILURE_UNAVAILABLE, f"worker {self._config.id} is leaving")
        await self._hand_over(failed)

    def _admit(self, claim: Claim, now: float) -> list[job_pb2.Delivery]:
        if self._journal.holds(claim):
            return []
        if self._journal.drop(claim.job.request_id) is not None:
            # The same id, submitted or claimed anew: what runs here belongs to an attempt that is over.
            self._engine.abort(claim.job.request_id)
        request = self._journal.open(claim, now)
        try:
            self._engine.add(request)
        except AdmissionError as error:
            return self._fail(request.request_id, job_pb2.FAILURE_INVALID, str(error))
        return []

    def _fail(self, request_id: str, failure: job_pb2.Failure, error: str) -> list[job_pb2.Delivery]:
        self._engine.abort(request_id)
        delivery = self._journal.fail(request_id, failure, error)
        return [] if delivery is None else [delivery]

    async def _hand_over(self, deliveries: list[job_pb2.Delivery]) -> None:
        if deliveries:
            await self._commits.put(deliveries)
        self._update_room()

    def _update_room(self) -> None:
        if len(self._journal.running) + len(self._inbox) < self._config.max_running:
            self._room.set()
        else:
            self._room.clear()

    # Redis

    async def _committer(self) -> None:
        while True:
            deliveries = await self._commits.get()
            for delivery, outcome in zip(deliveries, await self._commit(deliveries), strict=True):
                if outcome is Commit.FENCED:
                    self._metrics.fenced.inc()
                    self._dropped.add(delivery.request_id)
                elif delivery.chunk.finish:
                    name = inference_pb2.FinishReason.Name(delivery.chunk.finish).lower()
                    self._metrics.jobs.labels(name).inc()
            self._commits.task_done()

    async def _commit(self, deliveries: Sequence[job_pb2.Delivery]) -> list[Commit]:
        """Commits until Redis has taken it. Repeating is safe: what was written already comes back as DUPLICATE."""
        while True:
            try:
                return await self._jobs.commit(self._config.id, self._info.incarnation, deliveries)
            except CommitGap as gap:
                return await self._end_gaps(deliveries, gap)
            except KvError as error:
                logger.warning("commit failed, trying again: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _end_gaps(self, deliveries: Sequence[job_pb2.Delivery], gap: CommitGap) -> list[Commit]:
        """Ends jobs whose log lacks tokens that this worker had committed: Redis has lost a part of its data."""
        logger.error("%s", gap)
        for delivery in deliveries:
            if delivery.request_id in gap.expected:
                await self._jobs.finish(
                    delivery.request_id,
                    finish=inference_pb2.ERROR,
                    failure=job_pb2.FAILURE_UNAVAILABLE,
                    error="the broker lost a part of this job's output",
                    expect_attempt=delivery.attempt,
                )
        return [Commit.FENCED if d.request_id in gap.expected else Commit.WRITTEN for d in deliveries]

    async def _intake(self) -> None:
        """Claims jobs while there is room to run them; the others wait in Redis, where everybody sees them."""
        worker, incarnation = self._config.id, self._info.incarnation
        entries: list[Entry] = []
        while True:
            await self._room.wait()
            count = self._config.max_running - len(self._journal.running) - len(self._inbox)
            try:
                # Entries whose claim failed are kept: Redis counts them as delivered and never gives them again.
                if not entries:
                    entries = await self._jobs.next_entries(self._reader, worker, incarnation, max(count, 1), BLOCK_MS)
                claims = await self._jobs.claim(worker, incarnation, entries) if entries else []
            except KvError as error:
                logger.warning("reading jobs failed, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            entries = []
            if claims:
                self._inbox += claims
                self._update_room()
                self._wake.set()

    async def _doorbell(self) -> None:
        """Request ids of jobs ended from outside. A lost one costs a step: the next commit is refused."""
        bell = Doorbell(self._broker)
        try:
            await bell.open(self._broker.keys.channel(self._info.incarnation))
            async for payload in bell:
                if payload is RECONNECTED:
                    self._dropped |= await self._ended_elsewhere()
                else:
                    self._dropped.add(payload.decode("utf-8", "replace"))
                self._wake.set()
        finally:
            await bell.close()

    async def _ended_elsewhere(self) -> set[str]:
        """Jobs that ended while the doorbell was broken."""
        ended: set[str] = set()
        for request_id in list(self._journal.running):
            try:
                job = await self._jobs.get(request_id)
            except KvError:
                return ended
            if job is not None and job.state is JobState.ENDED:
                ended.add(request_id)
        return ended

    def _publish_stats(self) -> None:
        self._metrics.engine(self._engine.stats())
