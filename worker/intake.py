"""What reaches a worker from Redis: jobs to run, and word of jobs that were ended elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvstore.doorbell import RECONNECTED, Doorbell
from kvstore.errors import KvError
from kvstore.jobs import Claim, Jobs, JobState
from kvstore.outage import Outage
from worker.arrivals import NOT_YET

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.client import Broker
    from kvstore.entries import Entry
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
        self._ended: set[str] = set()
        self._fenced: dict[str, int] = {}
        """Of jobs whose write was refused: the attempt that it was made for."""
        self._rung: dict[str, float] = {}
        self._room = asyncio.Event()
        self._room.set()
        self.full = asyncio.Event()
        """Set while there is no room: jobs may be waiting in Redis."""
        self.news = asyncio.Event()
        """Set when there is something to take."""

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

    def take(self) -> tuple[list[Claim], set[str]]:
        """New claims, and ids of jobs that were ended elsewhere since the last call. What is claimed of the
        latter is a new attempt."""
        self.news.clear()
        ended, self._ended = self._ended, set()
        fenced, self._fenced = self._fenced, {}
        claims, self._claims = self._claims, []

        def over(claim: Claim) -> bool:
            request_id = claim.job.request_id
            return request_id in ended or claim.attempt <= fenced.get(request_id, 0)

        running = self._journal.running
        lost = {request_id for request_id in fenced if request_id in running and over(running[request_id].claim)}
        return [claim for claim in claims if not over(claim)], ended | lost

    def drop(self, request_id: str, attempt: int) -> None:
        """A job whose write was refused: this attempt at it is not ours any more. A later one may be."""
        self._fenced[request_id] = max(attempt, self._fenced.get(request_id, 0))
        self.news.set()

    def update_room(self) -> None:
        """To be called when jobs have begun, started or ended."""
        if self._free() > 0:
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
        tokens = sum(len(claim.job.prompt_token_ids) for claim in waiting)
        enough = tokens >= READ_AHEAD_S * self._rates.now.prefill_tok_s
        return max(LEAST_AHEAD - len(waiting), 0) if enough else READ_AT_ONCE

    async def read(self) -> None:
        """Claims jobs. Never returns."""
        outage = Outage(logger, "reading jobs")
        entries: list[Entry] = []
        while True:
            await self._room.wait()
            try:
                # Entries whose claim failed are kept: Redis counts them as delivered and never gives them again.
                if not entries:
                    entries = await self._jobs.next_entries(
                        self._reader, self._worker, self._incarnation, min(max(self._free(), 1), READ_AT_ONCE), BLOCK_MS
                    )
                claims = await self._jobs.claim(self._worker, self._incarnation, entries)
                # The word that a job was ended may have overtaken the answer to its claim.
                now = time.monotonic()
                self._rung = {i: at for i, at in self._rung.items() if now - at < REMEMBERED_S}
                ended = await self._ended_among(c.job.request_id for c in claims if c.job.request_id in self._rung)
            except KvError as error:
                outage.failed(error)
                await asyncio.sleep(RETRY_S)
                continue
            outage.worked()
            entries = []
            if claims:
                self._claims += [claim for claim in claims if claim.job.request_id not in ended]
                self.update_room()
                self.news.set()

    async def listen(self) -> None:
        """Notes jobs that are ended elsewhere. Never returns. A word that is lost costs little: the next commit of the
        job is refused."""
        async for payload in self._bell:
            if payload is RECONNECTED:
                self._ended |= await self._missed()
            else:
                request_id = payload.decode("utf-8", "replace")
                self._rung[request_id] = time.monotonic()
                self._ended.add(request_id)
            self.news.set()

    async def _missed(self) -> set[str]:
        """Jobs that ended while nobody listened."""
        outage = Outage(logger, "looking for ended jobs")
        while True:
            held = [*self._journal.running, *(claim.job.request_id for claim in self._claims)]
            try:
                ended = await self._ended_among(held)
            except KvError as error:
                outage.failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                outage.worked()
                return ended

    async def _ended_among(self, request_ids: Iterable[str]) -> set[str]:
        ended: set[str] = set()
        for request_id in list(request_ids):
            job = await self._jobs.get(request_id)
            if job is None or job.state is JobState.ENDED:
                ended.add(request_id)
        return ended
