"""Every bound of a request, checked before anything is queued. Pure: no clock, no I/O, no model.

``check`` needs the request alone and runs first; ``resolve`` needs the prompt's tokens and the model's limits,
and makes the Job with every optional field filled in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.errors import AdmissionError, shown
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ROLES: Final = ("system", "user", "assistant", "tool")
MAX_MESSAGES: Final = 1024
MAX_MODEL_NAME: Final = 256
MAX_SALT_BYTES: Final = 256
MAX_STOPS: Final = 16
MAX_STOP_BYTES: Final = 256
MAX_TEMPERATURE: Final = 100.0
NOT_SERVED: Final = "not served by this version"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows. `context_length`: tokens that prompt and answer may have together."""

    context_length: int
    vocab_size: int


def check(request: inference_pb2.GenerateRequest) -> None:
    """Refuses, with AdmissionError, what can be refused without knowing the model."""
    if request.request_id:
        check_request_id(request.request_id)
    if len(request.model) > MAX_MODEL_NAME:
        raise AdmissionError("model", shown(request.model), f"must have at most {MAX_MODEL_NAME} characters")
    _check_input(request)
    _check_unserved(request)
    _check_sampling(request.sampling)
    _check_stopping(request.stopping)
    salt_bytes = len(request.cache_salt.encode())
    if salt_bytes > MAX_SALT_BYTES:
        raise AdmissionError("cache_salt", shown(request.cache_salt), f"must have at most {MAX_SALT_BYTES} bytes")


def check_request_id(request_id: str) -> None:
    """Refuses, with AdmissionError, an id that may not name a job."""
    if not REQUEST_ID.fullmatch(request_id):
        raise AdmissionError("request_id", shown(request_id), "must be 1 to 128 characters of [A-Za-z0-9._:-]")


def resolve(
    request: inference_pb2.GenerateRequest,
    *,
    request_id: str,
    model: str,
    prompt: Sequence[int],
    limits: Limits,
    seed: int,
) -> job_pb2.Job:
    """The Job for a checked request whose prompt has these token ids.

    `seed` (0 to 2^64 - 1) is used when the request sets none. Raises AdmissionError for what breaks the model's limits.
    """
    max_tokens = _max_tokens(request.stopping, len(prompt), limits.context_length)
    _check_token_ids(prompt, limits.vocab_size)
    wanted = request.sampling
    if wanted.top_k > limits.vocab_size:
        limit = f"must be 0 (off) to the vocabulary's size, {limits.vocab_size}"
        raise AdmissionError("sampling.top_k", str(wanted.top_k), limit)
    return job_pb2.Job(
        request_id=request_id,
        model=model,
        prompt_token_ids=prompt,
        sampling=inference_pb2.Sampling(
            temperature=wanted.temperature if wanted.HasField("temperature") else 1.0,
            top_p=wanted.top_p if wanted.HasField("top_p") else 1.0,
            top_k=wanted.top_k,
            min_p=0.0,
            seed=wanted.seed if wanted.HasField("seed") else seed,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=max_tokens,
            stop=request.stopping.stop,
            ignore_eos=request.stopping.ignore_eos,
            include_stop=request.stopping.include_stop,
        ),
        n=1,
        cache_salt=request.cache_salt,
    )


def _check_input(request: inference_pb2.GenerateRequest) -> None:
    given = request.WhichOneof("input")
    if given is None:
        raise AdmissionError("input", "not set", "one of text, token_ids and chat is needed")
    if given == "text" and not request.text:
        raise AdmissionError("text", "empty", "must have at least 1 character")
    if given == "token_ids" and not request.token_ids.ids:
        raise AdmissionError("token_ids", "empty", "must have at least 1 id")
    if given == "chat":
        _check_messages(request.chat.messages)


def _check_messages(messages: Sequence[inference_pb2.ChatMessage]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise AdmissionError("chat.messages", f"{len(messages)} messages", f"must be 1 to {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        # A role goes into the template as it is: free text there could write control tokens.
        if message.role not in ROLES:
            limit = f"must be one of {', '.join(ROLES)}"
            raise AdmissionError(f"chat.messages[{index}].role", shown(message.role), limit)


def _check_unserved(request: inference_pb2.GenerateRequest) -> None:
    if request.n > 1:
        raise AdmissionError("n", str(request.n), f"more than 1 choice is {NOT_SERVED}")
    sampling, stopping = request.sampling, request.stopping
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1
    # Name, value, the one value that changes nothing.
    fields: tuple[tuple[str, float, float], ...] = (
        ("priority", request.priority, 0),
        ("sampling.min_p", sampling.min_p, 0),
        ("sampling.repetition_penalty", repetition, 1),
        ("sampling.presence_penalty", sampling.presence_penalty, 0),
        ("sampling.frequency_penalty", sampling.frequency_penalty, 0),
        ("stopping.min_tokens", stopping.min_tokens, 0),
    )
    for name, value, neutral in fields:
        if value != neutral:  # NaN is unequal to everything, so it is refused here
            raise AdmissionError(name, shown(value), f"{NOT_SERVED} (must be unset or {neutral})")
    present = (
        ("logprobs", str(request.logprobs), request.HasField("logprobs")),
        ("prompt_logprobs", str(request.prompt_logprobs), request.HasField("prompt_logprobs")),
        ("detached", "true", request.detached),
        ("sampling.logit_bias", f"{len(sampling.logit_bias)} entries", bool(sampling.logit_bias)),
        ("stopping.stop_token_ids", f"{len(stopping.stop_token_ids)} ids", bool(stopping.stop_token_ids)),
    )
    for name, text, is_present in present:
        if is_present:
            raise AdmissionError(name, text, f"{NOT_SERVED} (must be unset)")


def _check_sampling(sampling: inference_pb2.Sampling) -> None:
    temperature, top_p = sampling.temperature, sampling.top_p
    # Written so that NaN, which compares false, is refused.
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise AdmissionError("sampling.temperature", shown(temperature), f"must be 0 to {MAX_TEMPERATURE:g}")
    if sampling.HasField("top_p") and not 0 < top_p <= 1:
        raise AdmissionError("sampling.top_p", shown(top_p), "must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise AdmissionError("sampling.top_k", str(sampling.top_k), "must be 0 (off) to the vocabulary's size")


def _check_stopping(stopping: inference_pb2.Stopping) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise AdmissionError("stopping.max_tokens", str(stopping.max_tokens), "must be at least 1")
    if len(stopping.stop) > MAX_STOPS:
        raise AdmissionError("stopping.stop", f"{len(stopping.stop)} strings", f"must be at most {MAX_STOPS}")
    for index, stop in enumerate(stopping.stop):
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            raise AdmissionError(f"stopping.stop[{index}]", shown(stop), f"must have 1 to {MAX_STOP_BYTES} bytes")


def _max_tokens(stopping: inference_pb2.Stopping, prompt: int, context: int) -> int:
    if prompt < 1:
        raise AdmissionError("prompt", "0 tokens", "must have at least 1")
    if not stopping.HasField("max_tokens"):
        if prompt >= context:
            limit = f"must leave room for at least 1 token in the context of {context}"
            raise AdmissionError("prompt", f"{prompt} tokens", limit)
        return context - prompt
    asked = stopping.max_tokens
    if prompt + asked > context:
        value = f"{asked} after a prompt of {prompt} tokens"
        limit = f"together they must be at most the context of {context}"
        raise AdmissionError("stopping.max_tokens", value, limit)
    return asked


def _check_token_ids(prompt: Sequence[int], vocab_size: int) -> None:
    if max(prompt) < vocab_size:
        return
    index = next(place for place, token in enumerate(prompt) if token >= vocab_size)
    limit = f"must be below the vocabulary's size, {vocab_size}"
    raise AdmissionError(f"token_ids.ids[{index}]", str(prompt[index]), limit)
