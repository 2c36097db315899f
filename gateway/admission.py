"""Every bound of a request, checked before anything is queued. Pure: no clock, no I/O, no model.

``check`` needs the request alone and runs first; ``resolve`` needs the prompt's tokens and the model's limits,
and makes the Job with every optional field filled in.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.errors import AdmissionError, shown
from gateway.responses import BY_ITSELF
from kvstore.limits import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_MODEL_NAME,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_PROMPT_LOGPROBS,
    MAX_REPETITION,
    MAX_SALT_BYTES,
    MAX_STOP_BYTES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_STRUCTURE_BYTES,
    MAX_TEMPERATURE,
    MAX_TOP,
    MIN_REPETITION,
)
from kvstore.prompts import give
from kvstore.tenants import REQUEST_ID
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.jobs import JobRecord

CALLER: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
ROLES: Final = ("system", "user", "assistant", "tool")
MAX_MESSAGES: Final = 1024
MAX_TOOLS: Final = 128
"""Of a chat, and calls of a message."""
# As the protocol's float32 has it: what a client writes as 0.01 must pass.
LEAST_REPETITION: Final = struct.unpack("f", struct.pack("f", MIN_REPETITION))[0]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows. `context_length`: tokens that prompt and answer may have together."""

    context_length: int
    vocab_size: int


def check(request: inference_pb2.GenerateRequest) -> None:
    """Refuses, with AdmissionError, what can be refused without knowing the model."""
    if request.request_id:
        check_request_id(request.request_id)
    check_caller(request.caller)
    if len(request.model) > MAX_MODEL_NAME:
        raise AdmissionError("model", shown(request.model), f"must have at most {MAX_MODEL_NAME} characters")
    _check_input(request)
    _check_output(request)
    _check_sampling(request.sampling)
    _check_stopping(request.stopping)
    if request.HasField("structure"):
        _check_structure(request)
    salt_bytes = len(request.cache_salt.encode())
    if salt_bytes > MAX_SALT_BYTES:
        raise AdmissionError("cache_salt", shown(request.cache_salt), f"must have at most {MAX_SALT_BYTES} bytes")


def check_request_id(request_id: str) -> None:
    """Refuses, with AdmissionError, an id that may not name a job."""
    if not REQUEST_ID.fullmatch(request_id):
        raise AdmissionError("request_id", shown(request_id), "must be 1 to 128 characters of [A-Za-z0-9._:-]")


def check_caller(caller: str) -> None:
    """Refuses, with AdmissionError, what may not name a caller."""
    if caller and not CALLER.fullmatch(caller):
        raise AdmissionError("caller", shown(caller), "must be empty, or 1 to 64 characters of [A-Za-z0-9._-]")


def check_after(after: Mapping[int, int], record: JobRecord) -> None:
    """Refuses, with AdmissionError, to go on with choices that a job does not have, and behind what a whole answer
    has."""
    for choice, had in after.items():
        if choice >= len(record.next):
            raise AdmissionError("after", f"of choice {choice}", f"the job has {len(record.next)}, counted from 0")
        if record.ends.get(choice) in BY_ITSELF and had > record.next[choice]:
            limit = f"must be at most {record.next[choice]}, where that choice has ended"
            raise AdmissionError("after", f"{had} for choice {choice}", limit)


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
    _check_against_vocabulary(request, prompt, limits.vocab_size)
    _check_prompt_logprobs(request, len(prompt))
    if request.stopping.min_tokens > max_tokens:
        limit = f"must be at most max_tokens, {max_tokens}"
        if not request.stopping.HasField("max_tokens"):
            limit = f"must be at most {max_tokens}, which the context has room for after the prompt"
        raise AdmissionError("stopping.min_tokens", str(request.stopping.min_tokens), limit)
    job = job_pb2.Job(
        request_id=request_id,
        model=model,
        sampling=_resolved(request.sampling, seed),
        stopping=inference_pb2.Stopping(
            max_tokens=max_tokens,
            min_tokens=request.stopping.min_tokens,
            stop=request.stopping.stop,
            stop_token_ids=request.stopping.stop_token_ids,
            ignore_eos=request.stopping.ignore_eos,
            include_stop=request.stopping.include_stop,
        ),
        n=choices(request),
        priority=request.priority,
        cache_salt=request.cache_salt,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        detached=request.detached,
        structure=request.structure if request.HasField("structure") else None,
    )
    give(job, prompt)
    return job


def choices(request: inference_pb2.GenerateRequest) -> int:
    """How many answers are wanted."""
    return max(request.n, 1)


def _resolved(wanted: inference_pb2.Sampling, seed: int) -> inference_pb2.Sampling:
    """With every optional field set."""
    return inference_pb2.Sampling(
        temperature=wanted.temperature if wanted.HasField("temperature") else 1.0,
        top_p=wanted.top_p if wanted.HasField("top_p") else 1.0,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        seed=wanted.seed if wanted.HasField("seed") else seed,
        repetition_penalty=wanted.repetition_penalty if wanted.HasField("repetition_penalty") else 1.0,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        logit_bias=wanted.logit_bias,
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
        if len(request.chat.tools) > MAX_TOOLS:
            raise AdmissionError("chat.tools", f"{len(request.chat.tools)} tools", f"must be at most {MAX_TOOLS}")


def _check_messages(messages: Sequence[inference_pb2.ChatMessage]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise AdmissionError("chat.messages", f"{len(messages)} messages", f"must be 1 to {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        # A role goes into the template as it is: free text there could write control tokens.
        if message.role not in ROLES:
            limit = f"must be one of {', '.join(ROLES)}"
            raise AdmissionError(f"chat.messages[{index}].role", shown(message.role), limit)
        if len(message.tool_calls) > MAX_TOOLS:
            size = f"{len(message.tool_calls)} calls"
            raise AdmissionError(f"chat.messages[{index}].tool_calls", size, f"must be at most {MAX_TOOLS}")


def _check_output(request: inference_pb2.GenerateRequest) -> None:
    if request.n > MAX_CHOICES:
        raise AdmissionError("n", str(request.n), f"must be at most {MAX_CHOICES}")
    for field, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if value > MAX_TOP:
            raise AdmissionError(field, str(value), f"must be 0 to {MAX_TOP}")
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise AdmissionError("priority", str(request.priority), f"must be -{MAX_PRIORITY} to {MAX_PRIORITY}")


def _check_sampling(sampling: inference_pb2.Sampling) -> None:
    # Ranges are written so that NaN, which compares false, is refused.
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise AdmissionError("sampling.top_p", shown(sampling.top_p), "must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise AdmissionError("sampling.top_k", str(sampling.top_k), "must be 0 (off) to the vocabulary's size")
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    for name, value, least, most in (
        ("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", repetition, LEAST_REPETITION, MAX_REPETITION),
        ("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
    ):
        if not least <= value <= most:
            raise AdmissionError(f"sampling.{name}", shown(value), f"must be {least:g} to {most:g}")
    if len(sampling.logit_bias) > MAX_BIASES:
        size = f"{len(sampling.logit_bias)} entries"
        raise AdmissionError("sampling.logit_bias", size, f"must be at most {MAX_BIASES}")
    beyond = [token for token, bias in sampling.logit_bias.items() if not -MAX_BIAS <= bias <= MAX_BIAS]
    if beyond:
        token = min(beyond)  # a map has no order of its own
        limit = f"must be -{MAX_BIAS:g} to {MAX_BIAS:g}"
        raise AdmissionError(f"sampling.logit_bias[{token}]", shown(sampling.logit_bias[token]), limit)


def _check_stopping(stopping: inference_pb2.Stopping) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise AdmissionError("stopping.max_tokens", str(stopping.max_tokens), "must be at least 1")
    if len(stopping.stop) > MAX_STOPS:
        raise AdmissionError("stopping.stop", f"{len(stopping.stop)} strings", f"must be at most {MAX_STOPS}")
    for index, stop in enumerate(stopping.stop):
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            raise AdmissionError(f"stopping.stop[{index}]", shown(stop), f"must have 1 to {MAX_STOP_BYTES} bytes")
    if len(stopping.stop_token_ids) > MAX_STOP_TOKENS:
        size = f"{len(stopping.stop_token_ids)} ids"
        raise AdmissionError("stopping.stop_token_ids", size, f"must be at most {MAX_STOP_TOKENS}")


def _check_structure(request: inference_pb2.GenerateRequest) -> None:
    """Whether it can be compiled is found out elsewhere: ``gateway.structures``."""
    structure = request.structure
    match structure.WhichOneof("kind"):
        case None:
            raise AdmissionError("structure", "empty", "one of json_schema, regex and json_object is needed")
        case "json_object":
            if not structure.json_object:
                raise AdmissionError("structure.json_object", "false", "must be true; free text has no structure")
        case kind:
            text = getattr(structure, kind)
            if not 1 <= (size := len(text.encode())) <= MAX_STRUCTURE_BYTES:
                raise AdmissionError(f"structure.{kind}", f"{size} bytes", f"must have 1 to {MAX_STRUCTURE_BYTES}")
    if request.stopping.ignore_eos:
        raise AdmissionError("stopping.ignore_eos", "true", "must be false with a structure, whose end is the answer's")


def _max_tokens(stopping: inference_pb2.Stopping, prompt: int, context: int) -> int:
    if prompt < 1:
        raise AdmissionError("prompt", "0 tokens", "must have at least 1")
    if prompt >= context:
        limit = f"must be at most {context - 1}, as the context of {context} holds prompt and answer; shorten it"
        raise AdmissionError("prompt", f"{prompt} tokens", limit)
    if not stopping.HasField("max_tokens"):
        return context - prompt
    if prompt + stopping.max_tokens > context:
        value = f"{stopping.max_tokens} after a prompt of {prompt} tokens"
        limit = f"must be at most {context - prompt}, as the context of {context} holds prompt and answer"
        raise AdmissionError("stopping.max_tokens", value, limit)
    return stopping.max_tokens


def _check_against_vocabulary(request: inference_pb2.GenerateRequest, prompt: Sequence[int], size: int) -> None:
    """Control tokens and others that were added count as any: they are in the vocabulary."""
    limit = f"must be below the vocabulary's size, {size}"
    for name, ids in (("token_ids.ids", prompt), ("stopping.stop_token_ids", request.stopping.stop_token_ids)):
        if ids and max(ids) >= size:
            index = next(place for place, token in enumerate(ids) if token >= size)
            raise AdmissionError(f"{name}[{index}]", str(ids[index]), limit)
    biased = max(request.sampling.logit_bias, default=0)
    if biased >= size:
        raise AdmissionError("sampling.logit_bias", f"for token {biased}", limit)
    for name, top, what in (
        ("sampling.top_k", request.sampling.top_k, "0 (off)"),
        ("logprobs", request.logprobs, "0"),
        ("prompt_logprobs", request.prompt_logprobs, "0"),
    ):
        if top > size:
            raise AdmissionError(name, str(top), f"must be {what} to the vocabulary's size, {size}")


def _check_prompt_logprobs(request: inference_pb2.GenerateRequest, prompt: int) -> None:
    if request.HasField("prompt_logprobs") and prompt * (1 + request.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
        value = f"{request.prompt_logprobs} for a prompt of {prompt} tokens"
        limit = f"the prompt's tokens times (1 + prompt_logprobs) must be at most {MAX_PROMPT_LOGPROBS}"
        raise AdmissionError("prompt_logprobs", value, limit)
