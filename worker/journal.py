"""From the engine's outputs to deliveries, and the shell's record of each claimed job.

Synchronous and without I/O: the loop hands in claims and outputs and gets protobuf to commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.v1 import inference_pb2, job_pb2
from worker.params import SamplingParams, StopParams
from worker.sequence import Finish, Request

if TYPE_CHECKING:
    from kvstore.jobs import Claim
    from worker.step import Output

_FINISH: dict[Finish, inference_pb2.FinishReason] = {
    Finish.STOP: inference_pb2.STOP,
    Finish.LENGTH: inference_pb2.LENGTH,
    Finish.ERROR: inference_pb2.ERROR,
}


@dataclass(slots=True)
class Running:
    """A job between its claim and its end, as this process sees it. Times are of the caller's monotonic clock."""

    claim: Claim
    gateway: str
    """Incarnation that reads the job now; at first the one that submitted it."""
    claimed_at: float
    deadline: float | None
    next_index: int = 0
    cached_tokens: int = 0
    started: bool = False


@dataclass(slots=True)
class Journal:
    """The claimed jobs of one worker, by request id."""

    worker: str
    running: dict[str, Running] = field(default_factory=dict)
    ending: dict[str, Claim] = field(default_factory=dict)
    """Jobs whose last delivery is on its way to Redis, which still takes them for running."""

    def open(self, claim: Claim, now: float) -> Request:
        """Records a claim and returns what the engine is to run."""
        deadline = None if claim.remaining_ms is None else now + claim.remaining_ms / 1000
        self.running[claim.job.request_id] = Running(claim, claim.gateway, now, deadline)
        return request_of(claim.job)

    def holds(self, claim: Claim) -> bool:
        """Whether this very claim was taken already: it is repeated after a lost reply."""
        running = self.running.get(claim.job.request_id)
        held = running.claim if running else self.ending.get(claim.job.request_id)
        return held is not None and (held.entry_id, held.attempt) == (claim.entry_id, claim.attempt)

    def settle(self, delivery: job_pb2.Delivery) -> None:
        """Redis has answered for a delivery, one way or another."""
        if delivery.chunk.finish:
            self.ending.pop(delivery.request_id, None)

    def drop(self, request_id: str) -> Running | None:
        """Forgets a job that was ended elsewhere."""
        return self.running.pop(request_id, None)

    def expired(self, now: float) -> list[str]:
        return [i for i, job in self.running.items() if job.deadline is not None and job.deadline <= now]

    def gateways(self) -> set[str]:
        return {job.gateway for job in self.running.values()}

    def of_gateways(self, gateways: set[str]) -> list[tuple[str, str]]:
        """Request ids with the gateway that reads each."""
        return [(i, job.gateway) for i, job in self.running.items() if job.gateway in gateways]

    def read_by(self, request_id: str, gateway: str) -> None:
        """Another gateway reads the job now."""
        if request_id in self.running:
            self.running[request_id].gateway = gateway

    def record(self, output: Output, now: float) -> job_pb2.Delivery | None:
        """The delivery for one engine output; None when its job is no longer ours."""
        job = self.running.get(output.request_id)
        if job is None:
            return None
        chunk = inference_pb2.Chunk(
            choice=output.choice,
            start=output.start,
            token_ids=output.token_ids,
            text=output.text,
            stop_match=output.stop_match,
            error=output.error,
        )
        delivery = job_pb2.Delivery(request_id=output.request_id, attempt=job.claim.attempt, chunk=chunk)
        job.next_index = output.start + len(output.token_ids)
        if not job.started:
            job.started = True
            job.cached_tokens = output.cached_tokens
            delivery.route.CopyFrom(
                inference_pb2.Route(
                    worker=self.worker,
                    cached_tokens=output.cached_tokens,
                    queue_ms=job.claim.queued_ms,
                    prefill_ms=(now - job.claimed_at) * 1000,
                )
            )
        if output.finish is not None:
            delivery.chunk.finish = _FINISH[output.finish]
            if output.finish is Finish.ERROR:
                delivery.failure = job_pb2.FAILURE_INTERNAL
            delivery.usage.CopyFrom(
                inference_pb2.Usage(
                    prompt_tokens=output.prompt_tokens,
                    cached_tokens=output.cached_tokens,
                    completion_tokens=output.completion_tokens,
                    attempts=job.claim.attempt,
                )
            )
            self._end(output.request_id)
        return delivery

    def fail(self, request_id: str, failure: job_pb2.Failure, error: str) -> job_pb2.Delivery | None:
        """Ends a job from the shell: the terminal delivery to commit, or None when it is not ours."""
        job = self.running.get(request_id)
        if job is None:
            return None
        self._end(request_id)
        return job_pb2.Delivery(
            request_id=request_id,
            attempt=job.claim.attempt,
            failure=failure,
            chunk=inference_pb2.Chunk(start=job.next_index, finish=inference_pb2.ERROR, error=error),
            usage=inference_pb2.Usage(
                prompt_tokens=len(job.claim.job.prompt_token_ids),
                cached_tokens=job.cached_tokens,
                completion_tokens=job.next_index,
                attempts=job.claim.attempt,
            ),
        )

    def _end(self, request_id: str) -> None:
        self.ending[request_id] = self.running.pop(request_id).claim


def request_of(job: job_pb2.Job) -> Request:
    """A job as the engine takes it. The gateway has resolved every optional field."""
    return Request(
        request_id=job.request_id,
        prompt=tuple(job.prompt_token_ids),
        sampling=SamplingParams(
            temperature=job.sampling.temperature,
            top_p=job.sampling.top_p,
            top_k=job.sampling.top_k,
            seed=job.sampling.seed,
        ),
        stopping=StopParams(
            max_tokens=job.stopping.max_tokens,
            stop=tuple(job.stopping.stop),
            ignore_eos=job.stopping.ignore_eos,
            include_stop=job.stopping.include_stop,
        ),
        salt=job.cache_salt,
    )
