"""The shell around the engine: takes claims, drives steps, hands what they produced to Redis.

    intake ──claims, ended jobs──▶ (between steps) engine.step ──deliveries──▶ committer ──▶ Redis
    deadlines, the drain's end ──▶       in its own thread                     at most STEPS_AHEAD steps wait there

The engine never waits for Redis: the commit of a step overlaps the next steps. Only when commits fall far behind (Redis
is away) does the next step wait, so that what is buffered stays bounded. The engine is touched between steps by the
event loop and during steps by their thread, never by both at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.errors import KvError
from kvstore.jobs import Claim, Commit, Jobs
from octavo.v1 import inference_pb2, job_pb2
from worker.committer import Committer
from worker.errors import StuckError
from worker.heartbeat import Heartbeat
from worker.intake import Intake
from worker.journal import Journal
from worker.params import AdmissionError

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.registry import ModelCard, WorkerInfo
    from worker.config import WorkerConfig
    from worker.engine import Engine
    from worker.metrics import WorkerMetrics
    from worker.step import EngineStats

logger = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.2
"""How often an idle worker that drains looks whether it may go."""
DRAIN_MARGIN_S = 3.0
"""What a drain gets beyond its grace time, to tell Redis how its jobs ended."""
STEP_LIMIT_S = 120.0
"""A step that takes longer is not coming back."""


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
        self._engine = engine
        self._metrics = metrics
        self._jobs = Jobs(broker)
        self._journal = Journal(config.id)
        self._stats: EngineStats = engine.stats()
        self._heartbeat = Heartbeat(broker, info, card, self._journal, lambda: self._stats, config.orphan_grace)
        self._intake = Intake(broker, config.id, info.incarnation, self._journal, info.max_running)
        self._committer = Committer(self._jobs, config.id, info.incarnation, self._settled)
        self._draining = asyncio.Event()
        self._drained_by: float | None = None
        self._step_began: float | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def drain(self) -> None:
        """Takes no routed work any more, ends what is there within the grace time, then `run` returns."""
        if not self._draining.is_set():
            logger.info("draining: %d running", len(self._journal.running))
            self._drained_by = time.monotonic() + self._config.grace
            self._draining.set()
            self._heartbeat.drain()
            self._intake.news.set()

    async def run(self) -> None:
        """Serves until drained. Raises StuckError, LeaseLostError, or what broke a part that can't do without it."""
        self._tell(self._stats)
        await self._intake.open()
        parts = {
            "steps": self._work(),
            "committer": self._committer.run(),
            "lease": self._heartbeat.run(),
            "upkeep": self._heartbeat.tend(),
            "intake": self._intake.read(),
            "doorbell": self._intake.listen(),
            "watch": self._watch(),
        }
        tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        try:
            # Only the first ends by itself, when the worker is drained; of the others an end is a failure.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._thread.shutdown(wait=False)
            await self._intake.close()
            await self._heartbeat.leave()

    async def _work(self) -> None:
        """Steps until drained; then waits until Redis has all their output."""
        loop = asyncio.get_running_loop()
        idle = True
        while True:
            await self._apply_changes()
            if not self._engine.has_work:
                if not idle:
                    self._engine.check_integrity()
                    self._tell(self._engine.stats())
                idle = True
                if self._draining.is_set() and await self._nothing_left():
                    break
                await self._wait_for_news()
                continue
            idle = False
            self._step_began = began = time.monotonic()
            step = await loop.run_in_executor(self._thread, self._engine.step)
            self._step_began, now = None, time.monotonic()
            self._metrics.step(step.stats, now - began)
            self._tell(step.stats)
            self._metrics.events(step.events)
            # A step that fails is tried again in parts, which mostly fail for the same reason.
            for failure in {repr(each): each for each in step.failures}.values():
                logger.error("a step failed, %d times in all", len(step.failures), exc_info=failure)
            await self._hand_over([d for o in step.outputs if (d := self._journal.record(o, now)) is not None])
        await self._committer.flushed()

    def _tell(self, stats: EngineStats) -> None:
        self._stats = stats
        self._metrics.engine(stats)

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_LOOK_S if self._draining.is_set() else None):
                await self._intake.news.wait()
        except TimeoutError:
            return

    async def _nothing_left(self) -> bool:
        """Whether a draining worker may go: no job is here, none is in its stream, and none can be routed here."""
        if self._drained_by is not None and time.monotonic() >= self._drained_by:
            return True
        if self._intake.waiting or self._committer.unsettled or not self._heartbeat.told_of_drain:
            return False
        try:
            queues = await self._jobs.queues()
        except KvError:
            return False
        return all(q.undelivered + q.pending == 0 for q in queues if q.worker == self._config.id)

    async def _watch(self) -> None:
        """Raises StuckError when a step does not return, or a drain does not end within its time."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            if self._step_began is not None and now - self._step_began > STEP_LIMIT_S:
                raise StuckError(f"a step has not returned for {STEP_LIMIT_S:.0f} s")
            if self._drained_by is not None and now > self._drained_by + DRAIN_MARGIN_S:
                lost = f"{len(self._journal.running)} jobs running, {self._committer.unsettled} chunks uncommitted"
                raise StuckError(f"the drain has not ended within its {self._config.grace:g} s: {lost}")

    async def _apply_changes(self) -> None:
        """Everything that must not happen during a step: new jobs, jobs ended elsewhere, deadlines, the drain's end."""
        failed: list[job_pb2.Delivery] = []
        now = time.monotonic()
        claims, ended = self._intake.take()
        for request_id in ended:
            if self._journal.drop(request_id) is not None:
                self._engine.abort(request_id)
                self._metrics.ended("dropped")
        for claim in claims:
            failed += self._admit(claim, now)
        for request_id in self._journal.expired(now):
            error = "the deadline passed while the worker ran the job"
            failed += self._fail(request_id, job_pb2.FAILURE_DEADLINE, error)
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
        return self._journal.fail(request_id, failure, error)

    async def _hand_over(self, deliveries: list[job_pb2.Delivery]) -> None:
        await self._committer.put(deliveries)
        self._intake.update_room()

    def _settled(self, delivery: job_pb2.Delivery, outcome: Commit) -> None:
        last = self._journal.settle(delivery)
        if outcome is Commit.FENCED:
            self._metrics.fenced.inc()
            self._intake.drop(delivery.request_id, delivery.attempt)
        elif last:
            self._metrics.ended(inference_pb2.FinishReason.Name(delivery.chunk.finish).lower())
