"""The worker of rq that runs batches.

How an abandoned job is found (rq's own way, at another pace): a worker renews the execution of its job every
MONITOR_S, and one that was not renewed for ABANDONED_S is taken out of the registry of started jobs and queued
again, by any worker, as long as the job has retries left; it gets new ones whenever a line is done. A job whose worker
died between taking and beginning it is in rq's intermediate queue, and is found there as long after it was seen first.
Of workers on the same machine it is seen at once that they are gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq import Worker
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker_registration import clean_worker_registry

from kvstore.batch_queue import ABANDONED_S, LOOK_S, BatchQueue, queue_of, settle
from kvstore.batch_turns import arrange
from kvstore.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rq import Queue
    from rq.executions import Execution
    from rq.job import Job

    from kvstore.batches import BatchStore

logger = logging.getLogger(__name__)

MONITOR_S: Final = 1
"""Between two heartbeats of a job that runs."""
_RQ_OWN_S: Final = 15
"""What rq takes off a worker's TTL to have the time that it waits for a job."""
_PR_SET_PDEATHSIG: Final = 1


class BatchWorker(Worker):
    """A worker of rq for one fleet's batches. `work` returns after SIGTERM or Ctrl-C: the batch that runs is left where
    it is, and queued again."""

    queue_class = BatchQueue

    def __init__(self, store: BatchStore, name: str, look: Callable[[], None] = lambda: None) -> None:
        """``look``: called about every second, whether a batch runs or not; must take no time, and raise nothing."""
        super().__init__(
            [queue_of(store)],
            name=name,
            connection=store.redis,
            serializer=JSONSerializer,
            job_monitoring_interval=MONITOR_S,
            maintenance_interval=LOOK_S,
            worker_ttl=_RQ_OWN_S + LOOK_S,
            log_job_description=False,
        )
        self.log_result_lifespan = False
        self._store = store
        self._look = look

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """As rq does it, of several that wait the one whose turn it is."""
        (queue,) = self.queues
        try:
            if self.should_run_maintenance_tasks:
                self.run_maintenance_tasks()  # which makes jobs of batches that came meanwhile
            arrange(self._store, queue)
        except (KvError, RedisError) as error:
            logger.warning("batches go in the order in which they wait: %s", error)
        return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)

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
