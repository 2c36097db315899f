"""The shell around the engine: takes claims, drives steps, hands what they produced to Redis.

    intake ──claims, ended jobs──▶ stepper: engine.step ──outputs──▶ journal ──deliveries──▶ committer ──▶ Redis
    deadlines, the drain's end ──▶     in its own thread             at most STEPS_AHEAD steps wait there
        ▲────── jobs of which Redis has lost something: again, from what is left ──────────────────┘

The engine waits for nobody: the next step begins while the event loop records, commits and tells of the last one, and
what jobs come or end meanwhile reaches it between steps. Only when commits fall far behind (Redis is away) does it
wait, so that what is buffered stays bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import KvError
from kvstore.jobs import Commit, Jobs
from kvstore.prefix_index import PrefixIndex
from octavo.v1 import inference_pb2, job_pb2
from worker.arrivals import Arrivals, log_of
from worker.committer import Committer
from worker.errors import StuckError
from worker.grammar import Grammars
from worker.heartbeat import Heartbeat
from worker.held import Held
from worker.intake import Intake
from worker.journal import Journal
from worker.leaving import Leaving
from worker.rates import Measured, Rates
from worker.stealing import Stealing
from worker.stepper import Stepper, until_back

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.client import Broker
    from kvstore.registry import ModelCard, WorkerInfo
    from worker.config import WorkerConfig
    from worker.engine import Engine
    from worker.metrics import WorkerMetrics
    from worker.pages import Pages
    from worker.step import EngineStats, StepOutput
    from worker.stepper import Stepped

logger = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.2
"""How often an idle worker that drains looks whether it may go."""
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
        pages: Pages | None = None,
    ) -> None:
        """``pages``: where blocks go that leave the pool, if anywhere; the engine must have paging then."""
        self._config = config
        self._pages = pages
        self._metrics = metrics
        metrics.watch_broker(broker.spent)
        metrics.watch_blocks(engine.ages)
        self._journal = Journal(config.id)
        self._max_running = info.max_running
        self._stats: EngineStats = engine.stats()
        self._held = Held()
        self._rates = Rates(Measured(info.prefill_tok_s, info.step_ms, info.sequence_ms))
        self._intake = Intake(broker, config.id, info.incarnation, self._journal, self._rates, info.max_running)
        self._stealing = Stealing(
            broker, info, self._intake, self._rates, self._free, metrics.stolen.inc, self._held.offered
        )
        jobs, index, life = Jobs(broker), PrefixIndex(broker), info.incarnation
        self._committer = Committer(
            *(jobs, index, self._held, config.id, life, self._settled),
            lambda *lost: self._arrivals.roll_back(*lost),
            self._journal.entry_of,
        )
        self._heartbeat = Heartbeat(
            *(broker, info, card, self._journal, self._committer, self._held, self._rates),
            *(lambda: self._stats, lambda: 0.0 if pages is None else pages.fetch_tok_s, config.orphan_grace),
        )
        self._leaving = Leaving(config.grace)
        self._stepper = Stepper(engine, self._note, pages.leave if pages else lambda: 0)
        if pages is not None:
            blocks = info.kv_tokens // info.block_size
            pages.attach(engine, blocks, self._stepper.adopt, lambda: self._rates.now.prefill_tok_s)
        self._arrivals = Arrivals(
            *(self._journal, self._stepper, pages, Grammars(card), log_of(broker), self._hand_over, metrics.went_on),
            self._intake.claim_again,
        )
        self._stepped: list[Stepped] = []
        """What the engine's thread has told and nobody has taken yet."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def drain(self, *, at_once: bool = False) -> None:
        """Reads no more jobs, ends what is here within the grace time, or ``at_once``, then `run` returns. What has not
        ended by then is left as it is, and goes on elsewhere."""
        if self._leaving.begin(time.monotonic()):
            logger.info("draining: %d running", len(self._journal.running))
            self._heartbeat.drain()
            self._intake.stop()
        if at_once:
            self._leaving.hurry(time.monotonic())
        self._intake.news.set()

    async def run(self) -> None:
        """Serves until drained. Raises StuckError, LeaseLostError, or what broke a part that can't do without it;
        StoppedError when it is drained and a step is under way that takes too long."""
        self._metrics.watch_thread("loop")
        self._metrics.engine(self._stats)
        await self._intake.open()
        if self._config.steal:
            await self._stealing.open()
        parts = {
            "work": self._work(),
            "steps": self._steps(),
            "committer": self._committer.run(),
            "lease": self._heartbeat.run(),
            "upkeep": self._heartbeat.tend(),
            "audit": self._heartbeat.audit(),
            "intake": self._intake.read(),
            "doorbell": self._intake.listen(),
            "refused": self._intake.judge(),
            "watch": self._watch(),
        }
        if self._config.steal:
            parts |= self._stealing.parts()
        if self._pages is not None:
            parts |= self._pages.parts(busy=lambda: bool(self._journal.running))
        tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        drained = innocent = False
        try:
            # Only the first ends by itself, when the worker is drained; of the others an end is a failure.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            drained = True
        except KvError:
            innocent = True  # its jobs are not what it broke of
            raise
        finally:
            self._stepper.close()
            tasks += self._arrivals.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._intake.close()
            await self._stealing.close()
            await self._heartbeat.leave(goodbye=innocent or self._leaving.begun)
            if self._pages is not None:
                await self._pages.forget()
                if drained:
                    await self._pages.save(self._thread)
            await until_back(self._thread, drained=drained)
            self._thread.shutdown()

    async def _steps(self) -> None:
        """The engine's thread. Raises what the engine raises."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._metrics.watch_thread, "engine")
        await loop.run_in_executor(self._thread, self._stepper.run, loop)

    async def _work(self) -> None:
        """Works until drained; then waits until Redis has all output."""
        while True:
            await self._take_steps()
            await self._apply_changes()
            if self._leaving.begun and self._nothing_left():
                break
            if not self._stepped:
                await self._wait_for_news()
        if self._committer.unsettled:  # what the index lacks goes with the lease
            await self._committer.flushed()

    def _free(self) -> bool:
        """Whether a job could begin now: there is a place, and none waits for its first token."""
        journal = self._journal
        room = journal.open_choices < self._max_running and not self._intake.waiting
        return room and not journal.unstarted and not self._leaving.begun

    def _note(self, stepped: Stepped) -> None:
        self._stepped.append(stepped)
        self._intake.news.set()

    async def _take_steps(self) -> None:
        """What the engine's thread has told, in order: to the journal, and from there to the committer."""
        while self._stepped:
            stepped, began = self._stepped.pop(0), time.monotonic()
            deliveries = [d for each in stepped.refused for d in self._journal.refuse(each)]
            output = stepped.output
            self._held.apply(stepped.events)
            if output is not None:
                record, ended, seen = self._journal.record, stepped.ended, stepped.seen
                deliveries += [d for o in output.outputs if (d := record(o, ended, seen)) is not None]
                self._metrics.taken(stepped, deliveries, began, time.monotonic())
            await self._hand_over(deliveries)
            self._stepper.taken()
            self._stats = stepped.stats
            self._metrics.engine(stepped.stats)
            self._metrics.events(stepped.events)
            self._stealing.look()
            if output is not None:
                if self._pages is not None:
                    self._pages.took(output)
                self._tell_step(output, stepped.ended - stepped.began)

    def _tell_step(self, output: StepOutput, seconds: float) -> None:
        stats = output.stats
        self._metrics.step(stats, seconds)
        self._rates.busy_s += seconds
        if not output.failures:
            self._rates.step(prompt_tokens=stats.tokens - stats.decoded, decoded=stats.decoded, seconds=seconds)
        # A step that fails is tried again in parts, which mostly fail for the same reason.
        for failure in {repr(each): each for each in output.failures}.values():
            logger.error("a step failed, %d times in all", len(output.failures), exc_info=failure)

    async def _wait_for_news(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_LOOK_S if self._leaving.begun else None):
                await self._intake.news.wait()

    def _nothing_left(self) -> bool:
        """Whether a draining worker may go: no job is here or on its way, and the fleet knows that none may come. What
        is in its stream unread is taken by others."""
        if self._journal.running:
            return False
        if self._leaving.time_is_up(time.monotonic()):
            return True
        coming = self._intake.waiting or not self._intake.stopped
        return not coming and not self._committer.unsettled and self._heartbeat.told_of_drain

    async def _watch(self) -> None:
        """Raises StuckError when a step does not return, or a drain does not end within its time."""
        while True:
            await asyncio.sleep(1.0)
            self._metrics.index(self._held.drifts)
            now = time.monotonic()
            began = self._stepper.step_began
            if began is not None and now - began > STEP_LIMIT_S:
                raise StuckError(f"a step has not returned for {STEP_LIMIT_S:.0f} s")
            if self._leaving.overdue(now):
                lost = f"{len(self._journal.running)} jobs running, {self._committer.unsettled} chunks uncommitted"
                raise StuckError(f"the drain has not ended within its {self._config.grace:g} s: {lost}")

    async def _apply_changes(self) -> None:
        """What the engine is to know before its next step: jobs that are new or were ended elsewhere, and deadlines."""
        failed, now = list[job_pb2.Delivery](), time.monotonic()
        claims, ended = self._intake.take()
        self._drop(ended, "dropped")
        for claim in claims:
            self._stealing.arrived()
            self._metrics.traces.claimed(claim, now)
            self._arrivals.take(claim, now)
        for request_id in self._journal.expired(now):
            self._stepper.abort(request_id)
            error = "the deadline passed while the worker ran the job"
            failed += self._journal.fail(request_id, job_pb2.FAILURE_DEADLINE, error)
        if self._leaving.time_is_up(now):
            # To the reaper these are jobs of a worker that is gone: they go on elsewhere, after what is committed.
            self._drop([*self._journal.running], "left")
        await self._hand_over(failed)

    def _drop(self, request_ids: Iterable[str], why: str) -> None:
        """Runs these no longer."""
        for request_id in request_ids:
            if self._journal.drop(request_id) is not None:
                self._stepper.abort(request_id)
                self._metrics.dropped(request_id, why)

    async def _hand_over(self, deliveries: list[job_pb2.Delivery]) -> None:
        await self._committer.put(deliveries)
        self._intake.update_room()

    def _settled(self, delivery: job_pb2.Delivery, entry: str, outcome: Commit) -> None:
        last = self._journal.settle(delivery, entry)
        refused = outcome is Commit.FENCED
        if last:
            self._intake.ended(delivery.request_id, entry, delivery.attempt, refused=refused)
            self._metrics.traces.settled(delivery, time.monotonic(), refused=refused)
        if refused:
            self._metrics.fenced.inc()
            self._intake.drop(delivery.request_id, delivery.attempt)
        elif last:
            self._metrics.ended(inference_pb2.FinishReason.Name(delivery.chunk.finish).lower())
            self._stealing.ended(delivery.usage.completion_tokens)
