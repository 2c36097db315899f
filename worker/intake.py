"""What reaches a worker from Redis: jobs to run, and word of jobs that were ended or moved elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvstore.doorbell import RECONNECTED, Doorbell
from kvstore.entries import Entry
from kvstore.errors import KvError
from kvstore.jobs import Claim, Jobs, JobState
from kvstore.outage import Outage
from worker.arrivals import NOT_YET

if TYPE_CHECKING:
    from kvstore.client import Broker
    from worker.journal import Journal
    from worker.rates import Rates

logger = logging.getLogger(__name__)

BLOCK_MS = 500
"""How long one read of the worker's stream blocks."""
READ_AT_ONCE = 4
"""Jobs per read. How many choices each has is known only once it is claimed, so few are read at a time."""
READ_AHEAD = 16
"""Choices that may wait in the engine beyond those that run."""
READ_AHEAD_S = 2.0
"""Nor is more read while prompts wait that take so long, beyond the next few."""
LEAST_AHEAD = 4
"""Jobs that are read however long their prompts are. They are what the scheduler knows of priorities: a high one waits
for the first token of one of so many, at most, before it is read."""
RETRY_S = 0.2
REMEMBERED_S = 10.0
"""How long an ended job's id is kept: its claim may still be on the way to us."""


class Intake:
    """Claims jobs while there is room to run them, and a few more; the others wait in Redis, where everybody sees them,
    and whoever is free can take them.

    The few more are what the scheduler chooses from by priority. Redis hands out jobs in the order of their arrival.
    """

    def __init__(
        self, broker: Broker, worker: str, incarnation: str, journal: Journal, rates: Rates, max_running: int
    ) -> None:
        self._jobs = Jobs(broker)
        self._bell = Doorbell(broker)
        self._channel = broker.keys.channel(incarnation)
        self._reader = broker.blocking()
        self._worker = worker
        self._incarnation = incarnation
        self._journal = journal
        self._rates = rates
        self._max_running = max_running
        self._claims: list[Claim] = []
        self._over: list[Claim] = []
        """Claims of running jobs that were ended or moved elsewhere."""
        self._refused: asyncio.Queue[Claim] = asyncio.Queue()
        """Claims of jobs, a write of which was refused, that nobody has looked into yet."""
        self._doubted: set[str] = set()
        """Their entries, and that of the one that is looked into: each is asked for once, however many are refused."""
        self._again: dict[str, Entry] = {}
        """By their ids: entries whose claims are to be repeated."""
        self._ended: set[tuple[str, int]] = set()
        """Entries and attempts of jobs that have ended here since the last claim was sent: its answer may be older."""
        self._rung: dict[str, float] = {}
        """Ids of jobs that are said to be over, with the time of the last word, the oldest first."""
        self._leaving = False
        self._room = asyncio.Event()
        self._room.set()
        self.full = asyncio.Event()
        """Set while there is no room: jobs may be waiting in Redis."""
        self.news = asyncio.Event()
        """Set when there is something to take."""
        self.stopped = False
        """Whether nothing is read any more, and nothing that was read is still on its way."""

    async def open(self) -> None:
        """Listens for ended jobs, from before the first claim on. Raises BrokerError."""
        await self._bell.open(self._channel)

    async def close(self) -> None:
        await self._bell.close()
        await self._reader.aclose()

    @property
    def waiting(self) -> int:
        """Claims that nobody has taken yet."""
        return len(self._claims)

    def stop(self) -> None:
        """Reads no more: what nobody has read is taken by other workers. What is being read just now still comes."""
        self._leaving = True
        self._room.set()

    def take(self) -> tuple[list[Claim], set[str]]:
        """New claims, and ids of running jobs that were ended or moved elsewhere since the last call. What is claimed
        of the latter is to be run."""
        self.news.clear()
        over, self._over = self._over, []
        claims, self._claims = self._claims, []
        running = self._journal.running
        lost = {name for claim in over if (name := claim.job.request_id) in running and running[name].claim is claim}
        return claims, lost

    def read_again(self) -> None:
        """Claims all once more that was read and has not ended: the broker may have a job for ours that nobody runs."""
        self._jobs.read_again(self._worker, self._incarnation)

    def claim_again(self, request_id: str, entry_id: str) -> None:
        """The same for the job of one entry."""
        self._again[entry_id] = Entry(entry_id, request_id)

    def ended(self, request_id: str, entry_id: str, attempt: int, *, refused: bool) -> None:
        """This attempt has ended here. A repeated claim of it that nobody has taken yet is older than that end, or the
        broker has lost the end: the next answer tells. It is asked for too where the end was ``refused``: should the
        broker have the job for ours all the same, nobody runs it."""
        self._ended.add((entry_id, attempt))
        kept = [claim for claim in self._claims if (claim.entry_id, claim.attempt) != (entry_id, attempt)]
        if refused or len(kept) < len(self._claims):
            self.claim_again(request_id, entry_id)
        self._claims = kept

    def drop(self, request_id: str, attempt: int) -> None:
        """A job's write was refused. What runs here under its id is mostly that attempt, and over; but it may be of one
        that the broker had lost, and that was submitted anew: ``judge`` finds out."""
        job = self._journal.running.get(request_id)
        if job is not None and job.claim.attempt <= attempt and job.claim.entry_id not in self._doubted:
            self._doubted.add(job.claim.entry_id)
            self._refused.put_nowait(job.claim)

    async def judge(self) -> None:
        """Ends what runs here though its writes are refused. Never returns."""
        while True:
            claim = await self._refused.get()
            if await self._look(claim):
                self._end(claim)
            self._doubted.discard(claim.entry_id)
            self._refused.task_done()

    def _end(self, claim: Claim) -> None:
        """This very claim is over. Another of the same entry is not: a broker that had lost the first has given us the
        job again, with the same attempt."""
        kept = [each for each in self._claims if each is not claim]
        if len(kept) == len(self._claims):
            self._over.append(claim)
        self._claims = kept
        self.news.set()

    def update_room(self) -> None:
        """To be called when jobs have begun, started or ended."""
        if self._leaving or self._free() > 0:
            self._room.set()
            self.full.clear()
        else:
            self._room.clear()
            self.full.set()

    def _free(self) -> int:
        claimed = sum(max(claim.job.n, 1) for claim in self._claims)
        places = self._max_running + READ_AHEAD - self._journal.open_choices - claimed
        return min(places, self._before_enough())

    def _before_enough(self) -> int:
        """How many more jobs may be read before the prompts here that wait for their first token keep the engine busy
        for a while. Its caches are not asked: what they save is seen soon enough. Those whose pages are being fetched
        keep it busy with nothing."""
        begun = [job.claim for job in self._journal.unstarted if job.since != NOT_YET]
        waiting = [*begun, *self._claims]
        tokens = sum(len(claim.job.prompt_token_ids) + sum(claim.next) for claim in waiting)
        enough = tokens >= READ_AHEAD_S * self._rates.now.prefill_tok_s
        return max(LEAST_AHEAD - len(waiting), 0) if enough else READ_AT_ONCE

    async def read(self) -> None:
        """Claims jobs until it is to ``stop``. Never returns."""
        outage = Outage(logger, "reading jobs")
        entries: list[Entry] = []
        while entries or not self._leaving:
            await self._room.wait()
            try:
                # Entries whose claim failed are kept: Redis counts them as delivered and never gives them again.
                if not (entries or self._leaving):
                    entries = await self._next()
                self._ended.clear()
                claims = await self._jobs.claim(self._worker, self._incarnation, entries)
                # The word that a job is over may have overtaken the answer to its claim.
                over = {c.entry_id for c in claims if c.job.request_id in self._rung and await self._is_over(c)}
            except KvError as error:
                outage.failed(error)
                await asyncio.sleep(RETRY_S)
                continue
            outage.worked()
            entries = []
            if claims:
                self._keep([claim for claim in claims if claim.entry_id not in over])
        self.stopped = True
        self.news.set()
        await asyncio.Event().wait()

    async def _next(self) -> list[Entry]:
        """Entries to claim: again, or new ones. Raises KvError."""
        if self._again:
            again, self._again = [*self._again.values()], {}
            return again
        count = min(max(self._free(), 1), READ_AT_ONCE)
        return await self._jobs.next_entries(self._reader, self._worker, self._incarnation, count, BLOCK_MS)

    def _keep(self, claims: list[Claim]) -> None:
        """Until they are taken."""
        for claim in claims:
            if (claim.entry_id, claim.attempt) in self._ended:
                self.claim_again(claim.job.request_id, claim.entry_id)
            else:
                self._claims.append(claim)
        self.update_room()
        self.news.set()

    async def listen(self) -> None:
        """Notes jobs that are ended or moved elsewhere. Never returns. A word that is lost costs little: the next
        commit of the job is refused."""
        async for payload in self._bell:
            held = [*(job.claim for job in self._journal.running.values()), *self._claims]
            if payload is RECONNECTED:
                # A broker that came back without its last second may have lost claims, but not what it has given us.
                self.read_again()
            else:
                request_id = payload.decode("utf-8", "replace")
                self._hear(request_id, time.monotonic())
                held = [claim for claim in held if claim.job.request_id == request_id]
            for claim in held:
                # The word may be an old one: of a job that has come back since, or of another life of its id.
                if await self._look(claim):
                    self._end(claim)

    def _hear(self, request_id: str, now: float) -> None:
        """Remembers the last words, in the order in which they came."""
        self._rung.pop(request_id, None)
        self._rung[request_id] = now
        while now - self._rung[oldest := next(iter(self._rung))] >= REMEMBERED_S:
            del self._rung[oldest]

    async def _look(self, claim: Claim) -> bool:
        """Whether a job is over, however long Redis takes to say so."""
        outage = Outage(logger, "looking for ended jobs")
        while True:
            try:
                over = await self._is_over(claim)
            except KvError as error:
                outage.failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                outage.worked()
                return over

    async def _is_over(self, claim: Claim) -> bool:
        """Whether this attempt at a job is not ours any more."""
        job = await self._jobs.get(claim.job.request_id)
        if job is None or job.state is JobState.ENDED:
            return True
        return (job.owner, job.entry, job.attempt) != (self._incarnation, claim.entry_id, claim.attempt)
