"""A gateway's own decision, as `octavo bench index` times it: hash, look, weigh, record, submit. No call and no
tokenizing, as the job is there already when a gateway decides."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from gateway.placing import Need, Placing
from gateway.prefixes import PromptHashes
from gateway.record import record_of
from kvstore.prompts import give
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.jobs import Jobs
    from kvstore.prefix_index import PrefixIndex
    from kvstore.registry import Registry, WorkerInfo

NO_BOUND: Final = 10**9
"""Of queues: nobody takes these jobs."""


def job_of(request_id: str, prompt: Sequence[int]) -> job_pb2.Job:
    """A job with that prompt."""
    job = job_pb2.Job(request_id=request_id, model="bench", stopping=inference_pb2.Stopping(max_tokens=64), n=1)
    give(job, prompt)
    return job


class Decisions:
    """Places one job after the other on the same workers."""

    def __init__(self, jobs: Jobs, registry: Registry, index: PrefixIndex, *, seed: int) -> None:
        self._jobs = jobs
        self._placing = Placing(registry, index, max_queue=NO_BOUND, rng=random.Random(seed))

    async def decide(self, job: job_pb2.Job, workers: Sequence[WorkerInfo]) -> str:
        """The id of the worker that has the job now. Raises BrokerError, WorkerGone."""
        booking = await self._placing.place(Need(job, PromptHashes(job)), workers)
        if booking is None:
            raise AssertionError("no worker takes jobs")
        record = record_of(booking.decision, job.request_id, booking.index, time.time_ns() // 1_000_000)
        try:
            await self._jobs.submit(
                job,
                digest=b"bench",
                worker=booking.target.worker,
                worker_incarnation=booking.target.incarnation,
                gateway="gateway",
                deadline_ms=None,
                max_queue=NO_BOUND,
                prefill=booking.charge.load.prefill,
                predicted=booking.predicted,
                route=record.SerializeToString(),
            )
        finally:
            self._placing.settle(booking, applied=True, stands=False)
        return booking.target.worker
