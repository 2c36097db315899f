"""How claimed jobs get to the engine: at once, or when the pages of their prompts are on their way there."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.jobs import Claim
    from kvstore.page import PageName
    from worker.journal import Journal, Running
    from worker.pages import Pages
    from worker.sequence import Request
    from worker.stepper import Stepper

NOT_YET: Final = sys.maxsize
"""No step has seen so many changes: of jobs that the engine has not got."""


class Arrivals:
    """Between the intake and the engine's thread."""

    def __init__(self, journal: Journal, stepper: Stepper, pages: Pages | None) -> None:
        self._journal = journal
        self._stepper = stepper
        self._pages = pages
        self.preparing: set[asyncio.Task[None]] = set()
        """Of jobs whose pages are being fetched: to be cancelled with the worker's other tasks."""

    def take(self, claim: Claim, now: float) -> None:
        """Records a claim, and sees to it that the engine gets it."""
        if self._journal.holds(claim):
            return
        if self._journal.drop(claim.job.request_id) is not None:
            # The same id, submitted or claimed anew: what runs here belongs to an attempt that is over.
            self._stepper.abort(claim.job.request_id)
        request = self._journal.open(claim, now, since=NOT_YET)
        job = self._journal.running[request.request_id]
        lacking = [] if self._pages is None else self._pages.lacking(request)
        if self._pages is None or not lacking:
            self._begin(request, job)
            return
        preparing = asyncio.create_task(self._prepare(self._pages, lacking, request, job), name="prepare")
        self.preparing.add(preparing)
        preparing.add_done_callback(self.preparing.discard)

    async def _prepare(self, pages: Pages, lacking: list[PageName], request: Request, job: Running) -> None:
        """Nothing is begun that has ended meanwhile."""
        await pages.prepare(lacking)
        if self._journal.running.get(request.request_id) is job:
            self._begin(request, job)

    def _begin(self, request: Request, job: Running) -> None:
        job.since = self._stepper.posted + 1
        self._stepper.add(request)
