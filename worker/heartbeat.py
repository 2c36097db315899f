"""A worker's heartbeat: its lease, its model card, its part of the prefix index, and jobs whose gateway has died."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.errors import KvError
from kvstore.jobs import Finished, Jobs
from kvstore.logs import about
from kvstore.loop_time import loop_timeout
from kvstore.outage import Outage
from kvstore.prefix_index import PrefixIndex
from kvstore.registry import HEARTBEAT_S, ModelCard, Registry, WorkerInfo
from octavo.v1 import inference_pb2, job_pb2
from worker.errors import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.client import Broker
    from worker.committer import Committer
    from worker.held import Held
    from worker.journal import Journal
    from worker.rates import Rates
    from worker.step import EngineStats

logger = logging.getLogger(__name__)

AUDIT_S = 30.0
"""How often the members of the prefix index are compared with the pool's offers; their number is at every heartbeat."""
CARD_S = 5.0
"""How often the model's card is renewed; also how long gateways may miss it after Redis has lost everything."""


class Heartbeat:
    """Tells the fleet once a second that this worker lives, and how it does."""

    def __init__(
        self,
        broker: Broker,
        info: WorkerInfo,
        card: ModelCard,
        journal: Journal,
        committer: Committer,
        held: Held,
        rates: Rates,
        stats: Callable[[], EngineStats],
        fetch_tok_s: Callable[[], float],
        orphan_grace_s: float,
    ) -> None:
        """``fetch_tok_s`` tells how many tokens a second of fetching pages brings; 0: none are fetched.
        ``orphan_grace_s``: seconds that a job goes on after its gateway's lease has lapsed."""
        self._registry = Registry(broker)
        self._jobs = Jobs(broker)
        self._index = PrefixIndex(broker)
        self._committer = committer
        self._held = held
        self._rates = rates
        self._info = info
        self._card = card
        self._journal = journal
        self._stats = stats
        self._fetch_tok_s = fetch_tok_s
        self._orphan_grace_s = orphan_grace_s
        self._draining = asyncio.Event()
        self._gone: dict[str, float] = {}
        self.told_of_drain = False
        """Whether the fleet knows that this worker takes no more jobs."""

    def drain(self) -> None:
        """Tells the fleet at once that this worker takes no more jobs."""
        self._info = replace(self._info, state="draining")
        self._draining.set()

    async def run(self) -> None:
        """Renews the lease. Never returns; raises LeaseLostError.

        A renewal that takes long is given up and repeated at once: the lease is short, and one stalled connection must
        not cost it.
        """
        outage = Outage(logger, "renewing the lease")
        while True:
            draining = self._draining.is_set()
            look = self._held.look()
            try:
                async with loop_timeout(HEARTBEAT_S):
                    renewed = await self._registry.renew(self._live_info())
            except TimeoutError:
                outage.failed("no answer in time")
                continue
            except KvError as error:
                outage.failed(error)
            else:
                outage.worked()
                if not renewed.held_lease:
                    raise LeaseLostError(f"another process holds the lease of worker {self._info.id}")
                self.told_of_drain = draining
                self._held.seen(look, renewed.held_count)
                self._committer.publish()
            await self._pause(draining)

    async def tend(self) -> None:
        """Renews the model's card and ends jobs that nobody reads, whether or not the other can be done. Never
        returns."""
        card, jobs = Outage(logger, "renewing the model's card"), Outage(logger, "ending jobs that nobody reads")
        card_due = 0.0
        while True:
            if time.monotonic() >= card_due and await _tried(card, self._registry.publish_model(self._card)):
                card_due = time.monotonic() + CARD_S
            await _tried(jobs, self._end_orphans())
            await asyncio.sleep(HEARTBEAT_S)

    async def audit(self) -> None:
        """Compares the prefix index with the pool's offers, member by member. Never returns."""
        outage = Outage(logger, "looking through the prefix index")
        while True:
            await asyncio.sleep(AUDIT_S)
            self._held.begin_audit()
            try:
                members = await self._index.members(self._info.id, self._info.incarnation)
            except KvError as error:
                outage.failed(error)
            else:
                outage.worked()
                self._held.audited(members)
                self._committer.publish()

    async def leave(self, *, goodbye: bool) -> None:
        """Gives the lease back, so that the fleet need not wait for it to lapse. Without a goodbye the jobs that this
        worker ran may be what it died of."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._registry.leave(self._info.id, self._info.incarnation, goodbye=goodbye)
        except (KvError, TimeoutError) as error:
            logger.warning("could not give back the lease, it will lapse: %s", error)

    async def _pause(self, told: bool) -> None:
        """Until the next beat, or until a drain begins that the fleet has not been told of."""
        if told:
            await asyncio.sleep(HEARTBEAT_S)
            return
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._draining.wait()
        except TimeoutError:
            return

    def _live_info(self) -> WorkerInfo:
        stats, rates = self._stats(), self._rates.now
        return replace(
            self._info,
            running=stats.running,
            waiting=stats.waiting,
            blocks_free=stats.blocks_free,
            blocks_cached=stats.blocks_cached,
            blocks_used=stats.blocks_used,
            prefill_tok_s=rates.prefill_tok_s,
            step_ms=rates.step_ms,
            sequence_ms=rates.sequence_ms,
            fetch_tok_s=self._fetch_tok_s(),
            index="degraded" if self._held.drifted else "exact",
            steps=stats.steps,
            busy_s=self._rates.busy_s,
            computed_tokens=stats.computed_tokens,
            output_tokens=stats.output_tokens,
            prefix_queried=stats.prefix_queried,
            prefix_hit=stats.prefix_hit,
        )

    async def _end_orphans(self) -> None:
        """Ends jobs whose gateway has been dead for the grace time, unless another gateway reads them by now."""
        gateways = self._journal.gateways()
        live = await self._registry.live_gateways(gateways) if gateways else set()
        now = time.monotonic()
        dead = gateways - live
        self._gone = {gateway: self._gone.get(gateway, now) for gateway in dead}
        overdue = {gateway for gateway, since in self._gone.items() if now - since >= self._orphan_grace_s}
        for request_id, gateway in self._journal.of_gateways(overdue):
            ended = await self._jobs.finish(
                request_id,
                finish=inference_pb2.ERROR,
                failure=job_pb2.FAILURE_UNAVAILABLE,
                error="the gateway that served this job died",
                expect_gateway=gateway,
            )
            if ended is Finished.FENCED:
                job = await self._jobs.get(request_id)
                if job is not None:
                    self._journal.read_by(request_id, job.gateway)
            else:
                logger.info("ended %s: its gateway is gone", request_id, extra=about(request_id))


async def _tried(outage: Outage, work: Awaitable[None]) -> bool:
    """Whether the broker has done it."""
    try:
        await work
    except KvError as error:
        outage.failed(error)
        return False
    outage.worked()
    return True
