"""Bounds of a job that gateway and worker must agree on. Pure: the worker's core reads them too.

A gateway checks each of them before it submits, with a message for the client (``gateway.admission``). A worker checks
them again (``broken``), because Redis may hold jobs that no gateway wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.block_hash import TOKEN_BYTES

if TYPE_CHECKING:
    from octavo.v1 import job_pb2

MAX_CHOICES = 32
"""Answers to one prompt, at most. A job's hash has fields for each."""

MAX_PRIORITY = 100
"""Priorities lie between minus this and this."""

MAX_REQUEST_ID = 128
"""Characters, all of them ASCII."""
MAX_TENANT = 64
"""Characters, all of them ASCII."""
MAX_JOB_NAME = MAX_TENANT + 1 + MAX_REQUEST_ID
"""Of the two, with a slash between them."""
MAX_MODEL_NAME = 256
"""Characters."""
MAX_SALT_BYTES = 256
MAX_STOPS = 16
MAX_STOP_BYTES = 256
"""Of one stop string."""
MAX_STOP_TOKENS = 64
MAX_BIASES = 4096
MAX_TEMPERATURE = 100.0
MAX_BIAS = 100.0
"""Biases lie between minus this and this."""
MAX_PENALTY = 2.0
"""Presence and frequency penalties lie between minus this and this."""
MIN_REPETITION = 0.01
MAX_REPETITION = 100.0
MAX_TOP = 20
"""Likeliest tokens beside each token, in `logprobs` and `prompt_logprobs`."""
MAX_PROMPT_LOGPROBS = 131072
"""Log-probabilities of one prompt: they travel in one chunk, of 1.5 MB then."""

MAX_STRUCTURE_BYTES = 65536
"""Of a JSON schema or a regular expression that an answer is to keep to."""

MAX_REST_BYTES = 65536 + MAX_STRUCTURE_BYTES
"""What a job takes beside its prompt, at most: 4096 biases of 13 bytes, 16 stop strings of 259, a structure, and little
more."""
MAX_JOB_BYTES = TOKEN_BYTES * 4 * 2**20 + MAX_REST_BYTES
"""Where the context is not known. A request has 4 MiB at most, and of a byte of it comes no more than one token."""


def broken(job: job_pb2.Job) -> str:
    """What a job breaks of these bounds, with the value and the bound; empty: nothing.

    Does not repeat what the job holds, and takes time by the number of its parts, not by their size.
    """
    sampling, stopping = job.sampling, job.stopping
    scored = len(job.prompt_token_ids) * (1 + job.prompt_logprobs) if job.HasField("prompt_logprobs") else 0
    for name, value, limit in (
        ("request_id (characters)", len(job.request_id), MAX_JOB_NAME),
        ("model (characters)", len(job.model), MAX_MODEL_NAME),
        ("n", job.n, MAX_CHOICES),
        ("priority, without its sign,", abs(job.priority), MAX_PRIORITY),
        ("cache_salt (bytes)", len(job.cache_salt.encode()), MAX_SALT_BYTES),
        ("stopping.stop (strings)", len(stopping.stop), MAX_STOPS),
        ("stopping.stop (bytes of one)", max(map(_size, stopping.stop[: MAX_STOPS + 1]), default=0), MAX_STOP_BYTES),
        ("stopping.stop_token_ids (ids)", len(stopping.stop_token_ids), MAX_STOP_TOKENS),
        ("sampling.logit_bias (entries)", len(sampling.logit_bias), MAX_BIASES),
        ("structure (bytes)", max(map(_size, (job.structure.json_schema, job.structure.regex))), MAX_STRUCTURE_BYTES),
        ("logprobs", job.logprobs, MAX_TOP),
        ("prompt_logprobs", job.prompt_logprobs, MAX_TOP),
        ("prompt_logprobs (of all tokens)", scored, MAX_PROMPT_LOGPROBS),
    ):
        if value > limit:
            return f"{name} is {value}, of {limit} at most"
    return ""


def _size(text: str) -> int:
    return len(text.encode())
