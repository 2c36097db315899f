"""From the engine's outputs to deliveries, and the shell's record of each claimed job.

Synchronous and without I/O: the loop hands in claims and outputs and gets protobuf to commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from octavo.v1 import inference_pb2, job_pb2
from worker.requests import request_of
from worker.sequence import Finish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.jobs import Claim
    from worker.past import Past
    from worker.sampling.draw import TokenLogprobs
    from worker.sequence import Request
    from worker.step import Output
    from worker.stepper import Refused

_FINISH: dict[Finish, inference_pb2.FinishReason] = {
    Finish.STOP: inference_pb2.STOP,
    Finish.LENGTH: inference_pb2.LENGTH,
    Finish.ERROR: inference_pb2.ERROR,
}


MAX_ROLLBACKS = 3
"""Of one attempt at a job: a broker that loses more than that can't be told anything."""


@dataclass(slots=True)
class Running:
    """A job between its claim and its end, as this process sees it. Times are of the caller's monotonic clock."""

    claim: Claim
    gateway: str
    """Incarnation that reads the job now; at first the one that submitted it."""
    claimed_at: float
    deadline: float | None
    next_index: list[int]
    """Of each choice: how many tokens it has, those of earlier attempts included."""
    open: set[int]
    """Choices that have not ended."""
    unsettled: set[int]
    """Choices whose end Redis has not taken yet."""
    since: int = 0
    """The number of the change by which the engine got it. Outputs of steps that have not seen it are another's."""
    cached_tokens: int = 0
    """As the first attempt found them that told of a token."""
    fetched_tokens: int = 0
    """Of the prompt: so many have come from the page store, if they were of use."""
    started: bool = False
    """Whether this process has told of a token."""
    told: bool = False
    """Whether anybody has, and with it of the route."""
    rollbacks: int = 0
    """How often the job was begun again from its log."""
    unread: bool = False
    """Whether the log is still to be read from which it was rolled back: until then nothing is known of its choices."""

    def is_of(self, attempt: int, entry: str) -> bool:
        """Whether it was claimed as this attempt, by this entry: ids may be submitted anew, attempts counted anew."""
        return (self.claim.attempt, self.claim.entry_id) == (attempt, entry)

    def go_on(self, past: Past) -> None:
        """The log was read: from there the job goes on."""
        choices = range(len(self.next_index))
        self.next_index = [len(past.said[choice]) for choice in choices]
        self.open = {*choices} - past.ended
        self.unsettled = {*self.open}
        self.told = bool(past)
        self.unread = False


@dataclass(slots=True)
class Journal:
    """The claimed jobs of one worker, by request id."""

    worker: str
    running: dict[str, Running] = field(default_factory=dict)
    ending: dict[str, Running] = field(default_factory=dict)
    """Jobs whose last deliveries are on their way to Redis, which still takes them for running."""

    def open(self, claim: Claim, now: float, since: int = 0) -> Request:
        """Records a claim and returns what the engine is to run. ``since``: see ``Running``."""
        deadline = None if claim.remaining_ms is None else now + claim.remaining_ms / 1000
        request = request_of(claim.job)
        still_open = {*range(request.n)} - claim.ended
        self.running[request.request_id] = Running(
            claim,
            claim.gateway,
            now,
            deadline,
            next_index=[*claim.next] or [0] * request.n,
            open=still_open,
            unsettled={*still_open},
            since=since,
            cached_tokens=claim.cached_tokens,
            told=bool(claim.ended) or any(claim.next),
        )
        return request

    def roll_back(
        self, request_id: str, attempt: int, entry: str, known: Mapping[int, int], since: int
    ) -> Running | None:
        """Takes a job back whose output Redis has lost a part of, and knows so many tokens of some choices: what runs
        of it is not its any more. None when it is not this claim's, or was taken back too often already."""
        for jobs in (self.running, self.ending):
            job = jobs.get(request_id)
            if job is not None and job.is_of(attempt, entry) and job.rollbacks < MAX_ROLLBACKS:
                del jobs[request_id]
                left = [known.get(choice, count) for choice, count in enumerate(job.next_index)]
                choices = {*range(len(left))}
                self.running[request_id] = replace(
                    job,
                    next_index=left,
                    open=choices,
                    unsettled={*choices},
                    since=since,
                    rollbacks=job.rollbacks + 1,
                    unread=True,
                )
                return self.running[request_id]
        return None

    def holds(self, claim: Claim) -> bool:
        """Whether this very claim was taken already: it is repeated, after a lost reply or because the broker had lost
        it. The job is known by the later one from then on: what was found out about the earlier is of that one only."""
        job = self.running.get(claim.job.request_id) or self.ending.get(claim.job.request_id)
        if job is None or not job.is_of(claim.attempt, claim.entry_id):
            return False
        job.claim = claim
        return True

    def entry_of(self, request_id: str) -> str:
        """Of a job that has just told something: the entry by which it was claimed."""
        job = self.running.get(request_id) or self.ending.get(request_id)
        return "" if job is None else job.claim.entry_id

    def settle(self, delivery: job_pb2.Delivery, entry: str) -> bool:
        """Redis has answered for a delivery, one way or another, of the job that was claimed by this entry: its id may
        be another's by now, with the same attempt. Whether that was the last of its job."""
        if not delivery.chunk.finish:
            return False
        jobs = (self.running.get(delivery.request_id), self.ending.get(delivery.request_id))
        for job in jobs:
            if job is not None and job.is_of(delivery.attempt, entry):
                job.unsettled.discard(delivery.chunk.choice)
        ended = jobs[1]
        if ended is None or ended.unsettled or not ended.is_of(delivery.attempt, entry):
            return False
        del self.ending[delivery.request_id]
        return True

    @property
    def open_choices(self) -> int:
        """Of all running jobs: what they take of the engine's places."""
        return sum(len(job.open) for job in self.running.values())

    @property
    def unstarted(self) -> list[Running]:
        """Running jobs that wait for their first token here."""
        return [job for job in self.running.values() if not job.started]

    def drop(self, request_id: str) -> Running | None:
        """Forgets a job that was ended elsewhere."""
        return self.running.pop(request_id, None)

    def expired(self, now: float) -> list[str]:
        """Jobs whose deadline has passed, once it is known where their ends belong."""
        due = {i: job for i, job in self.running.items() if job.deadline is not None and job.deadline <= now}
        return [i for i, job in due.items() if not job.unread]

    def gateways(self) -> set[str]:
        """Those whose death ends a job: of detached ones it does not."""
        return {job.gateway for job in self._attended().values()}

    def of_gateways(self, gateways: set[str]) -> list[tuple[str, str]]:
        """Request ids with the gateway that reads each, without detached jobs."""
        return [(i, job.gateway) for i, job in self._attended().items() if job.gateway in gateways]

    def _attended(self) -> dict[str, Running]:
        return {i: job for i, job in self.running.items() if not job.claim.job.detached}

    def read_by(self, request_id: str, gateway: str) -> None:
        """Another gateway reads the job now."""
        if request_id in self.running:
            self.running[request_id].gateway = gateway

    def record(self, output: Output, now: float, seen: int = 0) -> job_pb2.Delivery | None:
        """The delivery for one engine output, of a step that has seen so many changes; None when its job is no longer
        ours."""
        job = self.running.get(output.request_id)
        if job is None or job.since > seen:
            return None
        delivery = job_pb2.Delivery(
            request_id=output.request_id,
            attempt=job.claim.attempt,
            chunk=_chunk(output),
            route=self._route(job, output, now),
        )
        job.next_index[output.choice] = output.start + len(output.token_ids)
        if output.finish is not None:
            if output.finish is Finish.ERROR:
                delivery.failure = job_pb2.FAILURE_INVALID if output.refused else job_pb2.FAILURE_INTERNAL
            delivery.usage.CopyFrom(_usage(job))
            self._end(job, output.choice)
        return delivery

    def refuse(self, refused: Refused) -> list[job_pb2.Delivery]:
        """Ends a job that the engine would not take, if it is still the one that was given to it."""
        job = self.running.get(refused.request_id)
        if job is None or job.since != refused.change:
            return []
        failure = job_pb2.FAILURE_INTERNAL if refused.replay else job_pb2.FAILURE_INVALID
        return self.fail(refused.request_id, failure, refused.error)

    def fail(self, request_id: str, failure: job_pb2.Failure, error: str) -> list[job_pb2.Delivery]:
        """Ends a job from the shell: a terminal delivery for every open choice; none when the job is not ours."""
        job = self.running.get(request_id)
        if job is None:
            return []
        deliveries = []
        for choice in sorted(job.open):
            chunk = inference_pb2.Chunk(
                choice=choice, start=job.next_index[choice], finish=inference_pb2.ERROR, error=error
            )
            deliveries.append(
                job_pb2.Delivery(
                    request_id=request_id, attempt=job.claim.attempt, failure=failure, chunk=chunk, usage=_usage(job)
                )
            )
            self._end(job, choice)
        return deliveries

    def _route(self, job: Running, output: Output, now: float) -> inference_pb2.Route | None:
        """With a job's first delivery: how it came to be."""
        job.started = True
        if job.told:
            return None
        job.told = True
        job.cached_tokens = output.cached_tokens
        return inference_pb2.Route(
            worker=self.worker,
            predicted_cached_tokens=job.claim.predicted,
            cached_tokens=output.cached_tokens,
            fetched_tokens=min(job.fetched_tokens, output.cached_tokens),
            queue_ms=job.claim.queued_ms,
            prefill_ms=(now - job.claimed_at) * 1000,
        )

    def _end(self, job: Running, choice: int) -> None:
        job.open.discard(choice)
        if not job.open:
            request_id = job.claim.job.request_id
            self.ending[request_id] = self.running.pop(request_id)


def _chunk(output: Output) -> inference_pb2.Chunk:
    chunk = inference_pb2.Chunk(choice=output.choice, start=output.start, token_ids=output.token_ids, text=output.text)
    # Most chunks have none of the rest, which would take as long again.
    if output.logprobs or output.prompt_logprobs:
        chunk.logprobs.extend([_logprobs(each) for each in output.logprobs])
        chunk.prompt_logprobs.extend([_logprobs(each) for each in output.prompt_logprobs])
    if output.finish is not None:
        chunk.finish, chunk.stop_match, chunk.error = _FINISH[output.finish], output.stop_match, output.error
        if output.stop_token is not None:
            chunk.stop_token = output.stop_token
    return chunk


def _logprobs(each: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in each.top]
    return inference_pb2.TokenLogprobs(token_id=each.token_id, logprob=each.logprob, top=top)


def _usage(job: Running) -> inference_pb2.Usage:
    """What the job has used so far, all choices together."""
    return inference_pb2.Usage(
        prompt_tokens=len(job.claim.job.prompt_token_ids),
        cached_tokens=job.cached_tokens,
        completion_tokens=sum(job.next_index),
        attempts=job.claim.attempt,
    )
