"""Batches as jobs of rq: one for each, with the batch's id, in a queue of the fleet's own. JSON throughout, no pickle.

The truth about a batch is in ``batches`` and in its files: a job that rq has lost, or given up, is made anew or ends
the batch (``settle``). ``batch_worker`` runs jobs.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from rq import Queue, Retry, Worker, get_current_job
from rq.exceptions import DuplicateJobError, NoSuchJobError
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from kvstore.batches import BatchState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.batches import Batch, BatchStore

logger = logging.getLogger(__name__)

RUNS: Final = "gateway.batch.job.run"
"""What a job calls, with the batch's id."""
RETRIES: Final = 5
"""So often a batch's worker may die without a line done in between."""
KEPT_S: Final = 86_400
"""How long rq knows a job that has ended."""
ABANDONED_S: Final = 6
"""After so long without a heartbeat a job is taken for abandoned."""
DELETES: Final = 5
"""Tries to forget a job that ends just now."""
LOOK_S: Final = 1
"""Between two looks for abandoned jobs."""


class _Intermediate(IntermediateQueue):
    """rq waits a minute."""

    def should_be_cleaned_up(self, job_id: str) -> bool:
        seen = self.get_first_seen(job_id)
        return seen is not None and now() - seen > timedelta(seconds=ABANDONED_S)


class BatchQueue(Queue):
    @property
    def intermediate_queue(self) -> IntermediateQueue:
        return _Intermediate(self.key, connection=self.connection)

    def acquire_maintenance_lock(self) -> bool:
        """rq's holds for a quarter of an hour when whoever has it dies."""
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=10 * LOOK_S))


def queue_of(store: BatchStore) -> Queue:
    """The fleet's queue of batches."""
    return BatchQueue(store.keys.batch_queue, connection=store.redis, serializer=JSONSerializer)


def enqueue(store: BatchStore, batch_id: str) -> None:
    """A job for a batch, unless it has one. Raises BrokerError."""
    with store.translated():
        try:
            queue_of(store).enqueue_call(
                RUNS,
                args=(batch_id,),
                job_id=batch_id,
                description=f"batch {batch_id}",
                timeout=-1,
                result_ttl=KEPT_S,
                failure_ttl=KEPT_S,
                retry=Retry(max=RETRIES),
                unique=True,
            )
        except DuplicateJobError:
            logger.debug("batch %s has a job", batch_id)


def drop(store: BatchStore, batch_id: str) -> None:
    """Forgets a batch's job, whatever became of it. Raises BrokerError."""
    with store.translated():
        job = _job(store, batch_id)
        if job is not None:
            _delete(job)


def settle(store: BatchStore) -> None:
    """Sees to open batches that rq does nothing about, or not any more. Raises BrokerError, and RedisError."""
    without: list[Batch] = []
    for batch_id in store.open_ids():
        job = _job(store, batch_id)
        status = None if job is None else job.get_status(refresh=False)
        if status in (None, JobStatus.FINISHED, JobStatus.STOPPED, JobStatus.CANCELED):
            batch = store.get(batch_id)
            if batch is None:
                store.all()  # which forgets it
                continue
            if job is not None:
                logger.warning("the job of batch %s is %s, and made anew", batch_id, status)
                _delete(job)
            without.append(batch)
        elif status is JobStatus.FAILED and job is not None:
            result = job.latest_result()
            error = ((result.exc_string if result else None) or "").strip().rpartition("\n")[2]
            store.end(batch_id, BatchState.FAILED, f"given up after {RETRIES} tries without a line done: {error}")
    for batch in sorted(without, key=lambda batch: batch.created_ms):
        enqueue(store, batch.id)


def again() -> Any:
    """What a job returns that is to go on later, first of all."""
    return Retry(max=sys.maxsize, enqueue_at_front=True)


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker of batches, as rq knows it."""

    name: str
    host: str
    pid: int
    state: str
    batch: str
    """That it runs; empty: none."""
    heartbeat_age_s: float


def workers(store: BatchStore) -> list[WorkerSeen]:
    """Those of the fleet, by name; of one that was killed, for a minute more. Raises BrokerError."""
    with store.translated():
        found = Worker.all(queue=queue_of(store), serializer=JSONSerializer)
        return sorted(
            (
                WorkerSeen(
                    name=each.name,
                    host=each.hostname or "",
                    pid=each.pid or 0,
                    state=str(each.get_state()),
                    batch=each.get_current_job_id() or "",
                    heartbeat_age_s=(now() - each.last_heartbeat).total_seconds() if each.last_heartbeat else 0.0,
                )
                for each in found
            ),
            key=lambda each: each.name,
        )


class CurrentJob:
    """The job that this process runs; a stand-in where it runs none."""

    def __init__(self) -> None:
        self._job = get_current_job()

    def note(self, meta: Mapping[str, Any], *, moved: bool) -> None:
        """What dashboards show. `moved`: a line was done since, so that it gets its retries back. Raises RedisError."""
        if self._job is None:
            return
        self._job.meta = dict(meta)
        self._job.save_meta()  # type: ignore[no-untyped-call]
        if moved:
            self._job.retries_left = RETRIES
            self._job.connection.hset(self._job.key, "retries_left", RETRIES)


def _job(store: BatchStore, batch_id: str) -> Job | None:
    try:
        return Job.fetch(batch_id, connection=store.redis, serializer=JSONSerializer)
    except NoSuchJobError:
        return None


def _delete(job: Job) -> None:
    """rq reads a job's executions one by one, and fails when one ends meanwhile: then there is one less."""
    for left in reversed(range(DELETES)):
        try:
            job.delete()
        except ValueError:
            if not left:
                raise
        else:
            return
