"""How claimed jobs get to the engine: at once, or when their structure is compiled, the pages of their prompts are on
their way there, or the log of what an earlier attempt has said is read."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvstore import token_log
from kvstore.errors import BrokerAuth, BrokerFull, BrokerUnreachable
from kvstore.logs import about
from kvstore.outage import Outage, Refusals
from kvstore.structure import StructureRefused
from octavo.v1 import job_pb2
from worker.past import Gathered, PastLost, RolledBack
from worker.requests import request_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping

    from kvstore.client import Broker
    from kvstore.jobs import Claim
    from kvstore.page import PageName
    from worker.grammar import Grammars
    from worker.journal import Journal, Running
    from worker.pages import Pages
    from worker.past import Past
    from worker.sequence import Request
    from worker.stepper import Stepper

    ReadLog = Callable[[str], AsyncIterator[list[job_pb2.Delivery]]]
    HandOver = Callable[[list[job_pb2.Delivery]], Awaitable[None]]

logger = logging.getLogger(__name__)

NOT_YET: Final = sys.maxsize
"""No step has seen so many changes: of jobs that the engine has not got."""
RETRY_S = 0.2
UNREADABLE: Final = "the worker could not go on from what this job has said; what it logs tells why"
"""What callers are told; what was raised may name the broker."""
REFUSED: Final = "the broker does not let the worker read what this job has said; whoever runs it must allow that"
UNCOMPILED: Final = "the worker could not compile this job's structure; what it logs tells why"
READERS: Final = 4
"""Jobs whose logs are read at a time: after an outage all that run here may have to go on."""


def log_of(broker: Broker) -> ReadLog:
    """Reads token logs, page by page."""

    async def read(request_id: str) -> AsyncIterator[list[job_pb2.Delivery]]:
        last_id, more = b"0", True
        while more:
            page, last_id, more = await token_log.read_page(broker, request_id, last_id)
            yield page

    return read


class Arrivals:
    """Between the intake and the engine's thread."""

    def __init__(
        self,
        journal: Journal,
        stepper: Stepper,
        pages: Pages | None,
        grammars: Grammars,
        read_log: ReadLog,
        hand_over: HandOver,
        went_on: Callable[[str], None],
        give_again: Callable[[str, str], None],
    ) -> None:
        """``read_log`` gives all that a job has said, in pages; it raises KvError. ``hand_over`` takes deliveries to
        commit. ``went_on`` is told of jobs that don't begin: after an earlier "attempt", or after a "gap" in the log.
        ``give_again`` has the claim of a job repeated, by its id and entry."""
        self._journal = journal
        self._stepper = stepper
        self._pages = pages
        self._grammars = grammars
        self._read_log = read_log
        self._hand_over = hand_over
        self._went_on = went_on
        self._give_again = give_again
        self._outage = Outage(logger, "reading what jobs have said")
        self._readers = asyncio.Semaphore(READERS)
        self._preparing: set[asyncio.Task[None]] = set()
        """Of jobs whose structures, pages or logs are on their way."""

    def close(self) -> set[asyncio.Task[None]]:
        """Compiles no more. The tasks that are to be cancelled with the worker's others."""
        self._grammars.close()
        return self._preparing

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
        if lacking or claim.job.HasField("structure"):
            self._prepare(self._begin_prepared(lacking, request, job))
        else:
            self._begin(request, job)

    def roll_back(self, request_id: str, attempt: int, entry: str, known: Mapping[int, int]) -> RolledBack:
        """Redis has lost a part of this job's output, and knows so many tokens of some choices: the job goes on from
        what is left, if it is this attempt that is run here."""
        job = self._journal.roll_back(request_id, attempt, entry, known, since=NOT_YET)
        if job is None:
            jobs = (self._journal.running.get(request_id), self._journal.ending.get(request_id))
            here = any(each is not None and each.is_of(attempt, entry) for each in jobs)
            if not here:  # should Redis have it for ours all the same, it is to be begun
                self._give_again(request_id, entry)
            return RolledBack.TOO_OFTEN if here else RolledBack.NOT_OURS
        self._stepper.abort(request_id)
        self._went_on("gap")
        self._prepare(self._go_on(request_of(job.claim.job), job, known, None))
        return RolledBack.GOES_ON

    def _prepare(self, coming: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coming, name="prepare")
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _begin_prepared(self, lacking: list[PageName], request: Request, job: Running) -> None:
        """Nothing is begun that has ended meanwhile."""
        formed = await self._formed(request, job)
        if formed is None:
            return
        if self._pages is not None and lacking:
            job.fetched_tokens = await self._pages.prepare(lacking, request.request_id)
        if self._ours(job):
            self._begin(formed, job)

    async def _formed(self, request: Request, job: Running) -> Request | None:
        """With the grammar that the job asks for, if any; None when it can't be compiled, with which the job ends."""
        if not job.claim.job.HasField("structure"):
            return request
        try:
            return replace(request, grammar=await self._grammars.compile(job.claim.job.structure))
        except StructureRefused as refused:
            await self._fail(job, job_pb2.FAILURE_INVALID, f"structure: {refused}")
        except TimeoutError as late:
            await self._fail(job, job_pb2.FAILURE_UNAVAILABLE, f"structure: {late}")
        except Exception:  # as when going on fails
            logger.exception("the structure of %s", request.request_id, extra=about(request.request_id))
            await self._fail(job, job_pb2.FAILURE_INTERNAL, UNCOMPILED)
        return None

    async def _go_on(
        self, request: Request, job: Running, known: Mapping[int, int], ended: frozenset[int] | None
    ) -> None:
        """Reads what was said, and has the engine go on from there."""
        try:
            gathered = await self._gather(job, request.n)
            if gathered is None:
                return
            past = gathered.past(known=known, ended=ended)
            formed = await self._formed(request, job)
            if formed is None:
                return
            await self._fetch(request, past)
        except PastLost as lost:
            await self._fail(job, job_pb2.FAILURE_UNAVAILABLE, str(lost))
        except BrokerAuth as error:
            logger.error(
                "job %s ended, as its log may not be read: %s",
                request.request_id,
                error,
                extra=about(request.request_id),
            )
            await self._fail(job, job_pb2.FAILURE_UNAVAILABLE, REFUSED)
        except Exception:  # a fault of ours, or a log that is none: the job must not be left to nobody
            logger.exception("going on with %s failed", request.request_id, extra=about(request.request_id))
            await self._fail(job, job_pb2.FAILURE_INTERNAL, UNREADABLE)
        else:
            if self._ours(job):
                job.go_on(past)
                self._begin(formed, job, past)

    async def _gather(self, job: Running, choices: int) -> Gathered | None:
        """All that the job has said, however long Redis is away; None when it has ended meanwhile. Raises BrokerAuth
        where Redis refuses it for long."""
        refusals = Refusals()
        while self._ours(job):
            try:
                async with self._readers:
                    gathered = Gathered(choices)
                    async for page in self._read_log(job.claim.job.request_id):
                        gathered.add(page)
            except (BrokerUnreachable, BrokerAuth, BrokerFull) as error:  # others do not pass
                if refusals.last(error):
                    raise
                self._outage.failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._outage.worked()
                return gathered
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
            await self._pages.prepare(lacking, request.request_id)

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
