"""What a worker tells of each job that is traced: when it was claimed, came in, had its first token and its last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.jobs import Claim
    from kvstore.tracing import Trace, Tracing
    from octavo.v1 import job_pb2
    from worker.stepper import Stepped


@dataclass(slots=True)
class Traced:
    """A job that is traced. Times are of the monotonic clock."""

    trace: Trace
    claim: Claim
    at: float
    """When the last part ended that was told."""
    began: bool = False
    """Whether a step has taken it in."""
    spoke: bool = False
    """Whether it has its first token of this attempt."""
    said: float = 0.0
    """When it had its last token so far."""

    def is_of(self, attempt: int, entry: str) -> bool:
        """Whether it was claimed as this attempt, by this entry."""
        return (self.claim.attempt, self.claim.entry_id) == (attempt, entry)


class Traces:
    """The traced jobs of one worker, by request id. Its parts follow on each other: ``claim``, from submission on;
    ``wait``, until a step takes it in; ``prefill``, until the first token; ``decode``, until the last."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._jobs: dict[str, Traced] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def claimed(self, claim: Claim, now: float) -> None:
        """The worker has taken a job. Another one of that id is over."""
        job, known = claim.job, self._jobs.get(claim.job.request_id)
        if not job.traceparent or (known is not None and known.is_of(claim.attempt, claim.entry_id)):
            return
        self.ended(job.request_id, "replaced", now, failed=True)
        began = now - claim.queued_ms / 1000
        trace = self._tracing.begin("octavo.run", began, job.traceparent)
        trace.tell(request_id=job.request_id, attempt=claim.attempt, prompt_tokens=len(job.prompt_token_ids))
        trace.part("claim", began, now)
        self._jobs[job.request_id] = Traced(trace, claim, now)

    def stepped(self, stepped: Stepped, deliveries: Iterable[job_pb2.Delivery]) -> None:
        """A step has been made, and this is what came of it."""
        if not self._jobs or stepped.output is None:
            return
        for request_id in stepped.output.admitted:
            job = self._jobs.get(request_id)
            if job is not None and not job.began:
                job.began = True
                self._part(job, "wait", stepped.began)
        for delivery in deliveries:
            job = self._jobs.get(delivery.request_id)
            if job is not None and job.claim.attempt == delivery.attempt and delivery.chunk.token_ids:
                job.said = stepped.ended
                if not job.spoke:
                    job.spoke = True
                    self._part(job, "prefill", stepped.ended)

    def settled(self, delivery: job_pb2.Delivery, now: float, *, refused: bool) -> None:
        """The broker has the last delivery of a job, or has refused it."""
        job = self._jobs.get(delivery.request_id)
        if job is None or job.claim.attempt != delivery.attempt:
            return
        usage, finish = delivery.usage, delivery.chunk.finish
        job.trace.tell(cached_tokens=usage.cached_tokens, completion_tokens=usage.completion_tokens)
        outcome = "fenced" if refused else inference_pb2.FinishReason.Name(finish).lower()
        self.ended(delivery.request_id, outcome, now, failed=refused or finish == inference_pb2.ERROR)

    def ended(self, request_id: str, outcome: str, now: float, *, failed: bool = False) -> None:
        """This worker has nothing to do with the job any more."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        if job.spoke:
            self._part(job, "decode", job.said)
        job.trace.end(outcome, now, failed=failed)

    def _part(self, job: Traced, name: str, ended: float) -> None:
        job.trace.part(name, job.at, ended)
        job.at = ended
