"""Batches as jobs of rq: one for each, with the batch's id, in a queue of the fleet's own. JSON throughout, no pickle.

How an abandoned job is found (rq's own way, at another pace): a worker renews the execution of its job every
MONITOR_S, and one that was not renewed for ABANDONED_S is taken out of the registry of started jobs and queued
again, by any worker, as long as the job has retries left; it gets new ones whenever a line is done. A job whose worker
died between taking and beginning it is in rq's intermediate queue, and is found there as long after it was seen first.
Of workers on the same machine it is seen at once that they are gone.

The truth about a batch is in ``batches`` and in its files: a job that rq has lost, or given up, is made anew or ends
the batch (``settle``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq import Queue, Retry, Worker, get_current_job
from rq.exceptions import DuplicateJobError, NoSuchJobError
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker_registration import clean_worker_registry

from kvstore.batches import BatchState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rq.executions import Execution

    from kvstore.batches import Batch, BatchStore

logger = logging.getLogger(__name__)

RUNS: Final = "gateway.batch.job.run"
"""What a job calls, with the batch's id."""
RETRIES: Final = 5
"""So often a batch's worker may die without a line done in between."""
KEPT_S: Final = 86_400
"""How long rq knows a job that has ended."""
MONITOR_S: Final = 1
"""Between two heartbeats of a job that runs."""
ABANDONED_S: Final = 6
"""After so long without one a job is taken for abandoned."""
_LOOK_S: Final = 1
"""Between two looks for abandoned jobs."""
_RQ_OWN_S: Final = 15
"""What rq takes off a worker's TTL to have the time that it waits for a job."""
_PR_SET_PDEATHSIG: Final = 1


class _Intermediate(IntermediateQueue):
    """rq waits a minute."""

    def should_be_cleaned_up(self, job_id: str) -> bool:
        seen = self.get_first_seen(job_id)
        return seen is not None and now() - seen > timedelta(seconds=ABANDONED_S)


class _Queue(Queue):
    @property
    def intermediate_queue(self) -> IntermediateQueue:
        return _Intermediate(self.key, connection=self.connection)

    def acquire_maintenance_lock(self) -> bool:
        """rq's holds for a quarter of an hour when whoever has it dies."""
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=10 * _LOOK_S))


class BatchWorker(Worker):
    """A worker of rq for one fleet's batches. `work` returns after SIGTERM or Ctrl-C: the batch that runs is left where
    it is, and queued again."""

    queue_class = _Queue

    def __init__(self, store: BatchStore, name: str, look: Callable[[], None] = lambda: None) -> None:
        """``look``: called about every second, whether a batch runs or not; must take no time, and raise nothing."""
        super().__init__(
            [queue_of(store)],
            name=name,
            connection=store.redis,
            serializer=JSONSerializer,
            job_monitoring_interval=MONITOR_S,
            maintenance_interval=_LOOK_S,
            worker_ttl=_RQ_OWN_S + _LOOK_S,
            log_job_description=False,
        )
        self.log_result_lifespan = False
        self._store = store
        self._look = look

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """rq adds a minute."""
        return ABANDONED_S

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        """A broker that is away for a while ends no batch."""
        self._look()
        try:
            super().maintain_heartbeats(job, execution)
        except (RedisConnectionError, RedisTimeoutError) as error:
            logger.warning("the broker does not answer: %s", error)

    def run_maintenance_tasks(self) -> None:
        """As rq does it, every second and without a word each time; and ``settle``."""
        self._look()
        (queue,) = self.queues
        if queue.acquire_maintenance_lock():
            try:
                self._bury()
                clean_registries(queue)
                clean_worker_registry(queue)
                queue.intermediate_queue.cleanup(self, queue)
                settle(self._store)
            finally:
                queue.release_maintenance_lock()  # type: ignore[no-untyped-call]
        self.last_cleaned_at = now()  # type: ignore[assignment]

    def _bury(self) -> None:
        """Workers of this machine whose processes are gone need not be waited for: the jobs that they had are abandoned
        at once."""
        (queue,) = self.queues
        for each in Worker.all(queue=queue, serializer=JSONSerializer):
            if each.name != self.name and each.hostname == self.hostname and not _lives(each.pid or 0):
                for execution in each.get_current_executions():
                    self.connection.zadd(queue.started_job_registry.key, {execution.composite_key: 0}, xx=True)
                each.register_death()  # type: ignore[no-untyped-call]

    def handle_warm_shutdown_request(self) -> None:
        """A batch may take hours: it is told to leave, not waited for."""
        super().handle_warm_shutdown_request()  # type: ignore[no-untyped-call]
        if self.horse_pid:
            with suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)

    def handle_work_horse_killed(self, job: Job, retpid: Any, ret_val: Any, rusage: Any) -> None:
        """What we know of it is as old as its beginning: it has got retries since."""
        job.refresh()  # type: ignore[no-untyped-call]
        super().handle_work_horse_killed(job, retpid, ret_val, rusage)  # type: ignore[no-untyped-call]

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        """In the child: it must not outlive us, or two would work on one batch."""
        die_with(self.pid or 0)
        super().main_work_horse(job, queue)


def die_with(parent: int) -> None:
    """The kernel ends this process when its parent ends, on Linux. Called in the child."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before that
        os._exit(1)


def _lives(pid: int) -> bool:
    """Whether another process than this one has that id: a container that starts again gives the same."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def queue_of(store: BatchStore) -> Queue:
    """The fleet's queue of batches."""
    return _Queue(store.keys.batch_queue, connection=store.redis, serializer=JSONSerializer)


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
            job.delete()


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
                job.delete()
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
