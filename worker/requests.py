"""From a job, as it rides in Redis, to what the engine runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.tenants import tenant_of
from worker.params import SamplingParams, StopParams
from worker.sequence import Request

if TYPE_CHECKING:
    from octavo.v1 import job_pb2


def request_of(job: job_pb2.Job) -> Request:
    """A job as the engine takes it. The gateway has resolved every optional field."""
    sampling, stopping = job.sampling, job.stopping
    return Request(
        request_id=job.request_id,
        prompt=tuple(job.prompt_token_ids),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple(sorted(sampling.logit_bias.items())),
        ),
        stopping=StopParams(
            max_tokens=stopping.max_tokens,
            min_tokens=stopping.min_tokens,
            stop=tuple(stopping.stop),
            stop_token_ids=tuple(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
            include_stop=stopping.include_stop,
        ),
        salt=job.cache_salt,
        tenant=tenant_of(job.request_id),
        n=max(job.n, 1),
        priority=job.priority,
        logprobs=job.logprobs if job.HasField("logprobs") else None,
        prompt_logprobs=job.prompt_logprobs if job.HasField("prompt_logprobs") else None,
    )
