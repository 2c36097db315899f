"""What a worker of batches runs for each: rq calls ``run`` in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.access import AccessError, read_access
from gateway.batch.batches import Place
from gateway.batch.journal import Journal, Locked
from gateway.batch.lines import FileError, checked, parse
from gateway.batch.run import STALLED_S, BatchRun
from gateway.client import Client
from kvstore import batch_turns
from kvstore.batch_queue import CurrentJob, again, queue_of
from kvstore.batches import IN_FLIGHT, BatchState, BatchStore
from kvstore.errors import BrokerError, KvError, MalformedValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gateway.access import Access
    from gateway.batch.lines import Line
    from kvstore.batches import Batch, Progress

logger = logging.getLogger(__name__)

LOCK_PAUSE_S: Final = 0.2
ACCEPT_S: Final = 10.0
"""How long the client asks by itself for what no gateway takes; then the batch knows, tells, and asks again."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What the process of a worker of batches is told, by its environment: jobs say no more than a batch's id."""

    redis: str
    namespace: str
    targets: str
    """HOST:PORT of gateways, with commas between them."""
    folder: Path
    in_flight: int = IN_FLIGHT
    """Lines at once, of batches that don't say how many."""
    tls_ca: str = ""
    """This and the next three: as ``gateway.access.read_access`` takes them."""
    client_cert: str = ""
    client_key: str = ""
    api_key: str = field(default="", repr=False)
    """Of an operator, where gateways want keys: batches of tenants are run for these."""

    def as_environment(self) -> dict[str, str]:
        """Variables for ``job_config``."""
        return {
            "OCTAVO_REDIS": self.redis,
            "OCTAVO_NAMESPACE": self.namespace,
            "OCTAVO_TARGET": self.targets,
            "OCTAVO_BATCHES": str(self.folder),
            "OCTAVO_IN_FLIGHT": str(self.in_flight),
            "OCTAVO_TLS_CA": self.tls_ca,
            "OCTAVO_CLIENT_CERT": self.client_cert,
            "OCTAVO_CLIENT_KEY": self.client_key,
            "OCTAVO_API_KEY": self.api_key,
        }

    def access(self, tenant: str) -> Access:
        """How gateways are called for a tenant, with files as they are now. Raises AccessError."""
        return replace(read_access(self.tls_ca, self.client_cert, self.client_key, self.api_key), tenant=tenant)


def job_config(environment: Mapping[str, str]) -> JobConfig:
    """From variables. Raises KeyError for one that is lacking."""
    return JobConfig(
        redis=environment["OCTAVO_REDIS"],
        namespace=environment["OCTAVO_NAMESPACE"],
        targets=environment["OCTAVO_TARGET"],
        folder=Path(environment["OCTAVO_BATCHES"]),
        in_flight=int(environment["OCTAVO_IN_FLIGHT"]),
        tls_ca=environment["OCTAVO_TLS_CA"],
        client_cert=environment["OCTAVO_CLIENT_CERT"],
        client_key=environment["OCTAVO_CLIENT_KEY"],
        api_key=environment["OCTAVO_API_KEY"],
    )


def run(batch_id: str) -> Any:
    """Runs a batch to its end, or until SIGTERM; what this returns tells rq which. Raises BrokerError: it is to be
    tried again."""
    config = job_config(os.environ)
    store = BatchStore(config.redis, config.namespace)
    try:
        return asyncio.run(Job(config, Place(store, config.folder), batch_id).run())
    finally:
        store.close()


class Job:
    """One try of one batch."""

    def __init__(self, config: JobConfig, place: Place, batch_id: str) -> None:
        self._config = config
        self._place = place
        self._id = batch_id
        self._current = CurrentJob()
        self._noted = -1
        self._leave = asyncio.Event()

    async def run(self) -> Any:
        """Returns None when the batch has ended."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leave.set)
        store = self._place.store
        state = store.start(self._id)
        if state not in (BatchState.RUNNING, BatchState.CANCELLING):
            logger.info("batch %s is %s: nothing to do", self._id, state or "unknown")
            return None
        try:
            batch = await asyncio.to_thread(self._checked)
            journal = await self._journal(batch.settings.tenant)
            if journal is None:
                return again()
            try:
                ended = await self._lines(batch, journal)
            finally:
                journal.close()
            if ended and batch.settings.input_file:
                results = self._place.results(self._id)
                files = self._place.files(batch.settings.tenant)
                await asyncio.to_thread(files.publish, self._id, results, int(time.time()))
        except FileError as error:
            store.end(self._id, BatchState.FAILED, str(error))
            return None
        except (OSError, AccessError) as error:
            logger.exception("batch %s can't go on", self._id)
            store.end(self._id, BatchState.FAILED, f"{type(error).__name__}: {error}")
            return None
        if not ended:
            logger.info("batch %s is left where it is", self._id)
            return again()
        # Whoever cancelled it meanwhile comes too late if all is done.
        done = len(journal.tally.ids) == batch.settings.total
        state = BatchState.COMPLETED if done else BatchState.CANCELLED
        # What it was told of its progress last may be old, if the broker was away.
        ended_as = store.end(self._id, state, counts=journal.tally.counts)
        logger.info(
            "batch %s is %s: %d lines done, %d failed", self._id, ended_as, journal.tally.done, journal.tally.failed
        )
        return None

    def _checked(self) -> Batch:
        """The batch, and its lines are known to be fit. Raises FileError, OSError, BrokerError."""
        store = self._place.store
        batch = _there(store.get(self._id))
        if batch.settings.total:
            return batch
        with self._place.input(self._id).open("rb") as lines:
            total = sum(1 for _ in checked(lines, batch.settings.endpoint))
        store.count(self._id, total)
        return _there(store.get(self._id))

    async def _lines(self, batch: Batch, journal: Journal) -> bool:
        targets = (batch.settings.targets or self._config.targets).split(",")
        lines = self._without_result(journal.tally.ids)
        access = await asyncio.to_thread(self._config.access, batch.settings.tenant)
        async with Client([each.strip() for each in targets], accept_s=ACCEPT_S, access=access) as client:
            in_flight = batch.settings.in_flight or self._config.in_flight
            tenant = batch.settings.tenant
            run = BatchRun(client, batch, lines, journal, self._tell, lambda: self._others_wait(tenant), in_flight)
            if batch.state is BatchState.CANCELLING:
                await run.cancel_open()
                return True
            await asyncio.to_thread(batch_turns.note, self._place.store, tenant)
            ended = await run.run(self._leave)
        # Again, as those that began later may have given way sooner.
        await asyncio.to_thread(batch_turns.note, self._place.store, tenant)
        return ended

    async def _journal(self, tenant: str) -> Journal | None:
        """Waits for whoever writes it: a process that was taken for dead. None: it was told to leave, or gives way."""
        told, began_s = False, time.monotonic()
        while not self._leave.is_set():
            try:
                journal = Journal(self._place.results(self._id))
            except Locked as error:
                if not told:
                    logger.warning("batch %s: %s; waiting for its end", self._id, error)
                told = True
                await asyncio.sleep(LOCK_PAUSE_S)
                if time.monotonic() - began_s > STALLED_S:
                    if await asyncio.to_thread(self._others_wait, tenant):
                        return None
                    began_s = time.monotonic()
            else:
                if journal.cut:
                    logger.warning("batch %s: cut %d bytes of a line that was not whole", self._id, journal.cut)
                return journal
        return None

    def _without_result(self, ids: set[str]) -> Iterator[Line]:
        """Lines are read as they are needed. They were checked when they were accepted."""
        with self._place.input(self._id).open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                line = parse(number, raw)
                if line is not None and line.id not in ids:
                    yield line

    def _others_wait(self, tenant: str) -> bool:
        """Where that can't be known nobody is given way to."""
        try:
            return batch_turns.others_wait(self._place.store, queue_of(self._place.store), tenant)
        except KvError as error:
            logger.warning("batch %s: %s", self._id, error)
            return False

    def _tell(self, progress: Progress) -> BatchState | None:
        """A broker that is away ends nothing: results are in the file."""
        ended = progress.done + progress.failed
        try:
            state = self._place.store.note(self._id, progress)
            meta = {"batch": self._id, "state": str(state), "done": progress.done, "failed": progress.failed}
            with self._place.store.translated():
                self._current.note({**meta, "noted_s": time.time()}, moved=ended > self._noted >= 0)
        except BrokerError as error:
            logger.warning("batch %s: %s", self._id, error)
            return BatchState.RUNNING
        self._noted = ended
        return state


def _there(batch: Batch | None) -> Batch:
    """Raises MalformedValue: the broker has lost it, so that nobody knows how it is to be run."""
    if batch is None:
        raise MalformedValue("the broker has lost the batch")
    return batch
