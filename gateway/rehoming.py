"""Finds a new worker for each job whose worker is gone: routed like a new job, with what it has said already."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from gateway.models import most_common
from gateway.placing import Need
from gateway.prefixes import PromptHashes
from gateway.router import READY
from kvstore.orphans import Rehomed, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.pending import Promise
    from gateway.placing import Booking, Placing
    from kvstore.jobs import Jobs
    from kvstore.orphans import Orphan
    from kvstore.registry import Registry, WorkerInfo

ROUND_S: Final = 1.0
"""A round takes no longer than this, about: what it has seen of the fleet grows old. The next one goes on."""


class Rehoming:
    """Moves orphans on behalf of one gateway. Every gateway does; of several one moves a job."""

    def __init__(self, jobs: Jobs, registry: Registry, placing: Placing) -> None:
        self._jobs = jobs
        self._registry = registry
        self._placing = placing

    async def run(self) -> Counter[Rehomed]:
        """One round; how many of the jobs that it found went which way. Raises BrokerError."""
        until = time.monotonic() + ROUND_S
        done: Counter[Rehomed] = Counter()
        orphans = await self._jobs.orphans()
        if not orphans:
            return done
        live = await self._registry.workers()
        # What one job of this round brings to a worker counts for the next ones, until they are all placed.
        promises: list[Promise] = []
        given: set[str] = set()
        try:
            # Those that workers may have died of come last: the others are not to wait for them, nor to meet them.
            for orphan in sorted(orphans, key=lambda each: each.deaths):
                if time.monotonic() > until:
                    break
                done[await self._rehome(orphan, live, given, promises)] += 1
        finally:
            for promise in promises:
                self._placing.forget(promise)
        return done

    async def _rehome(
        self, orphan: Orphan, live: Sequence[WorkerInfo], given: set[str], promises: list[Promise]
    ) -> Rehomed:
        """`given`: workers that have got a suspect in this round, by incarnation."""
        booking = None if orphan.doomed else await self._placed(orphan, live, given)
        if booking is None:
            return await self._jobs.rehome(orphan, None)
        promises.append(booking.promise)
        target, applied = booking.target, True
        try:
            outcome = await self._jobs.rehome(
                orphan, Target(target.worker, target.incarnation, booking.charge.load.prefill, booking.predicted)
            )
            applied = outcome is Rehomed.MOVED
        finally:
            self._placing.settle(booking, applied=applied, stands=applied)
        if applied and orphan.deaths:
            given.add(target.incarnation)
        return outcome

    async def _placed(self, orphan: Orphan, live: Sequence[WorkerInfo], given: set[str]) -> Booking | None:
        workers = heirs(orphan, live)
        if not workers:
            return None
        need = Need(
            orphan.job,
            PromptHashes(orphan.job),
            said=[0 if choice in orphan.ended else count for choice, count in enumerate(orphan.next)],
            told=bool(orphan.next[0]),
            trials=False,
        )
        if orphan.deaths:
            # Should one of them be the cause, the others must not be there when it strikes again.
            free = [each for each in workers if each.incarnation not in given]
            if not free:
                given.clear()
            workers = free or workers
        return await self._placing.place(need, workers)


def heirs(orphan: Orphan, live: Sequence[WorkerInfo]) -> Sequence[WorkerInfo]:
    """Who may go on with a job: ready workers of its model, with room for it. Those of its fingerprint, which give the
    same bits, if there are any; else those whose tokenizer most of the others have, as for new jobs."""
    job = orphan.job
    longest = len(job.prompt_token_ids) + job.stopping.max_tokens
    able = [
        each
        for each in live
        if each.model == job.model
        and each.state == READY
        and each.incarnation != orphan.incarnation
        and (not each.context_length or each.context_length >= longest)
    ]
    if kin := [each for each in able if each.fingerprint == orphan.fingerprint]:
        return kin
    if not able:
        return ()
    tokenizer = most_common(each.tokenizer for each in able)
    return [each for each in able if each.tokenizer == tokenizer]
