"""How claimed jobs get to the engine: at once, or when the pages of their prompts are on their way there, or the log of
what an earlier attempt has said is read."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvstore import token_log
from kvstore.errors import KvError
from kvstore.outage import Outage
from octavo.v1 import job_pb2
from worker.journal import request_of
from worker.past import PastLost, past_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from kvstore.client import Broker
    from kvstore.jobs import Claim
    from kvstore.page import PageName
    from worker.journal import Journal, Running
    from worker.pages import Pages
    from worker.past import Past
    from worker.sequence import Request
    from worker.stepper import Stepper

    ReadLog = Callable[[str], Awaitable[list[job_pb2.Delivery]]]
    HandOver = Callable[[list[job_pb2.Delivery]], Awaitable[None]]

logger = logging.getLogger(__name__)

NOT_YET: Final = sys.maxsize
"""No step has seen so many changes: of jobs that the engine has not got."""
RETRY_S = 0.2


def log_of(broker: Broker) -> ReadLog:
    """Reads whole token logs."""

    async def read(request_id: str) -> list[job_pb2.Delivery]:
        log, _ = await token_log.read(broker, request_id)
        return log

    return read


class Arrivals:
    """Between the intake and the engine's thread."""

    def __init__(
        self,
        journal: Journal,
        stepper: Stepper,
        pages: Pages | None,
        read_log: ReadLog,
        hand_over: HandOver,
        went_on: Callable[[str], None],
    ) -> None:
        """``read_log`` gives all that a job has said; it raises KvError. ``hand_over`` takes deliveries to commit.
        ``went_on`` is told of jobs that don't begin: after an earlier "attempt", or after a "gap" in the log."""
        self._journal = journal
        self._stepper = stepper
        self._pages = pages
        self._read_log = read_log
        self._hand_over = hand_over
        self._went_on = went_on
        self._outage = Outage(logger, "reading what jobs have said")
        self.preparing: set[asyncio.Task[None]] = set()
        """Of jobs whose pages or logs are on their way: to be cancelled with the worker's other tasks."""

    def take(self, claim: Claim, now: float) -> None:
        """Records a claim, and sees to it that the engine gets it."""
        if self._journal.holds(claim):
            return
        if self._journal.drop(claim.job.request_id) is not None:
            # The same id, submitted or claimed anew: what runs here belongs to an attempt that is over.
            self._stepper.abort(claim.job.request_id)
        request = self._journal.open(claim, now, since=NOT_YET)
        job = self._journal.running[request.request_id]
        if job.told:
            self._went_on("attempt")
            self._prepare(self._go_on(request, job, dict(enumerate(claim.next)), claim.ended))
            return
        lacking = [] if self._pages is None else self._pages.lacking(request)
        if self._pages is None or not lacking:
            self._begin(request, job)
        else:
            self._prepare(self._begin_with_pages(self._pages, lacking, request, job))

    def roll_back(self, request_id: str, attempt: int, known: Mapping[int, int]) -> bool:
        """Redis has lost a part of this job's output, and knows so many tokens of some choices: the job goes on from
        what is left. False: it is not ours, or has been rolled back too often."""
        job = self._journal.roll_back(request_id, attempt, known, since=NOT_YET)
        if job is None:
            return False
        self._stepper.abort(request_id)
        self._went_on("gap")
        self._prepare(self._go_on(request_of(job.claim.job), job, known, None))
        return True

    def _prepare(self, coming: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coming, name="prepare")
        self.preparing.add(task)
        task.add_done_callback(self.preparing.discard)

    async def _begin_with_pages(self, pages: Pages, lacking: list[PageName], request: Request, job: Running) -> None:
        """Nothing is begun that has ended meanwhile."""
        job.fetched_tokens = await pages.prepare(lacking)
        if self._ours(job):
            self._begin(request, job)

    async def _go_on(
        self, request: Request, job: Running, known: Mapping[int, int], ended: frozenset[int] | None
    ) -> None:
        """Reads what was said, and has the engine go on from there."""
        try:
            log = await self._log(job)
            if log is None:
                return
            past = past_of(log, request.n, known=known, ended=ended)
            await self._fetch(request, past)
        except PastLost as lost:
            await self._fail(job, job_pb2.FAILURE_UNAVAILABLE, str(lost))
        except Exception as error:  # a fault of ours, which must not leave the job to nobody
            logger.exception("going on with %s failed", request.request_id)
            await self._fail(job, job_pb2.FAILURE_INTERNAL, f"{type(error).__name__}: {error}")
        else:
            if self._ours(job):
                job.go_on(past)
                self._begin(request, job, past)

    async def _log(self, job: Running) -> list[job_pb2.Delivery] | None:
        """All that the job has said, however long Redis is away; None when it has ended meanwhile."""
        while self._ours(job):
            try:
                log = await self._read_log(job.claim.job.request_id)
            except KvError as error:
                self._outage.failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._outage.worked()
                return log
        return None

    async def _fetch(self, request: Request, past: Past) -> None:
        """Pages of the prompt and of what was said after it, as if all of it were a prompt."""
        if self._pages is None:
            return
        whole = replace(request, prompt=(*request.prompt, *past.longest))
        if past.said[0] or 0 in past.ended:  # its scores have been told
            whole = replace(whole, prompt_logprobs=None)
        lacking = self._pages.lacking(whole)
        if lacking:
            await self._pages.prepare(lacking)

    async def _fail(self, job: Running, failure: job_pb2.Failure, error: str) -> None:
        if self._ours(job):
            await self._hand_over(self._journal.fail(job.claim.job.request_id, failure, error))

    def _ours(self, job: Running) -> bool:
        return self._journal.running.get(job.claim.job.request_id) is job

    def _begin(self, request: Request, job: Running, past: Past | None = None) -> None:
        job.since = self._stepper.posted + 1
        if past is None:
            self._stepper.add(request)
        else:
            self._stepper.add(request, past.said, past.ended)
