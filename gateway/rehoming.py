"""Finds a new worker for each job whose worker is gone: routed like a new job, with what it has said already."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from gateway.models import most_common
from gateway.placing import Need
from gateway.prefixes import PromptHashes
from kvstore.errors import BrokerAuth, BrokerUnreachable, BrokerWrongType
from kvstore.logs import about
from kvstore.orphans import Rehomed, Target
from kvstore.registry import READY

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from gateway.pending import Promise
    from gateway.placing import Booking, Placing
    from kvstore.jobs import Jobs
    from kvstore.orphans import Orphan
    from kvstore.registry import Registry, WorkerInfo
    from octavo.v1 import job_pb2

logger = logging.getLogger(__name__)

ROUND_S: Final = 1.0
"""A round takes no longer than this, about: what it has seen of the fleet grows old. The next one goes on."""


class Rehoming:
    """Moves orphans on behalf of one gateway. Every gateway does; of several one moves a job."""

    def __init__(self, jobs: Jobs, registry: Registry, placing: Placing) -> None:
        self._jobs = jobs
        self._registry = registry
        self._placing = placing
        self._failing: frozenset[str] = frozenset()
        """Jobs that could not be looked after in the last round."""

    async def run(self, done: Counter[Rehomed]) -> None:
        """One round. `done` counts, as it goes on, how many of the jobs that it found went which way. Raises
        BrokerUnreachable, BrokerAuth, and of what is not about one job BrokerError."""
        until = time.monotonic() + ROUND_S
        orphans = await self._jobs.orphans()
        if not orphans:
            return
        live = await self._registry.workers()
        # What one job of this round brings to a worker counts for the next ones, until they are all placed.
        promises: list[Promise] = []
        taken: set[str] = set()
        failing: set[str] = set()
        try:
            # Those that workers may have died of come last: the others are not to wait for them.
            for orphan in sorted(orphans, key=lambda each: each.deaths):
                if time.monotonic() > until:
                    break
                try:
                    done[await self._rehome(orphan, live, taken, promises)] += 1
                except (BrokerUnreachable, BrokerAuth):
                    raise
                except Exception:
                    # Those behind it must not wait for somebody to mend it.
                    failing.add(orphan.request_id)
                    if orphan.request_id not in self._failing:
                        logger.exception(
                            "job %s of worker %s can't be moved",
                            *(orphan.request_id, orphan.worker),
                            extra=about(orphan.request_id),
                        )
        finally:
            self._failing = frozenset(failing)
            for promise in promises:
                self._placing.forget(promise)

    async def _rehome(
        self, orphan: Orphan, live: Sequence[WorkerInfo], taken: set[str], promises: list[Promise]
    ) -> Rehomed:
        """`taken`: workers where no suspect may go, by incarnation, as far as this round has learnt."""
        workers = () if orphan.doomed else heirs(orphan, live)
        job: job_pb2.Job | None = None
        while workers:
            free = [each for each in workers if each.incarnation not in taken] if orphan.deaths else workers
            if not free:
                # Many may wait, and where they would go is not worth finding out. But that there are workers is.
                return await self._jobs.rehome(orphan, anywhere(orphan, workers[0]))
            job = job or await self._jobs.orphaned_job(orphan)
            if job is None:
                return Rehomed.STALE
            booking = await self._placed(orphan, job, free)
            if booking is None:
                break
            promises.append(booking.promise)
            try:
                outcome = await self._move(orphan, booking)
            except BrokerWrongType:
                # What the target reads is no stream, as its log tells.
                workers = [each for each in workers if each.incarnation != booking.target.incarnation]
                continue
            if outcome is Rehomed.WAITING or (orphan.alone and outcome is Rehomed.MOVED):
                taken.add(booking.target.incarnation)
            if outcome is not Rehomed.WAITING:
                return outcome
        return await self._jobs.rehome(orphan, None)

    async def _move(self, orphan: Orphan, booking: Booking) -> Rehomed:
        target, applied = booking.target, True
        try:
            outcome = await self._jobs.rehome(
                orphan, Target(target.worker, target.incarnation, booking.charge.load.prefill, booking.predicted)
            )
            applied = outcome is Rehomed.MOVED
        finally:
            self._placing.settle(booking, applied=applied, stands=applied)
        return outcome

    async def _placed(self, orphan: Orphan, job: job_pb2.Job, workers: Sequence[WorkerInfo]) -> Booking | None:
        need = Need(
            job,
            PromptHashes(job),
            said=said_of(orphan),
            told=bool(orphan.next[0]),
            trials=False,
        )
        return await self._placing.place(need, workers)


def said_of(orphan: Orphan) -> list[int]:
    """Tokens that each choice has which goes on; 0 for the others."""
    return [0 if choice in orphan.ended else count for choice, count in enumerate(orphan.next)]


def anywhere(orphan: Orphan, worker: WorkerInfo) -> Target:
    """A worker that has a suspect already, for one that waits: should the place be free by now, nothing is expected to
    be cached."""
    return Target(worker.id, worker.incarnation, orphan.prompt_tokens + sum(said_of(orphan)), 0)


def heirs(orphan: Orphan, live: Sequence[WorkerInfo]) -> Sequence[WorkerInfo]:
    """Who may go on with a job: ready workers of its model, with room for it. Those of its fingerprint, which give the
    same bits, if there are any; else those whose tokenizer most of the others have, as for new jobs. But what a
    draining worker may bring to its end is for its own kind alone."""
    able = [
        each
        for each in live
        if each.model == orphan.model
        and each.state == READY
        and each.incarnation != orphan.incarnation
        and (not each.context_length or each.context_length >= orphan.longest)
    ]
    if kin := [each for each in able if each.fingerprint == orphan.fingerprint]:
        return kin
    if not able or orphan.kept:
        return ()
    tokenizer = most_common(each.tokenizer for each in able)
    return [each for each in able if each.tokenizer == tokenizer]
