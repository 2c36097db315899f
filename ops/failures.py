"""Errors of the service in the words of `octavo generate`: its options for the protocol's fields."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import grpc
import grpc.aio

from gateway.stream import CALL_AGAIN
from ops.client import describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ops.answer import Answer

FLAGS: Final = {
    "request_id": "--request-id",
    "model": "--model",
    "text": "PROMPT",
    "prompt": "PROMPT",
    "chat": "--chat",
    "chat.messages": "the chat (PROMPT and --system)",
    "n": "--n",
    "priority": "--priority",
    "structure": "--json-schema, --regex or --json-object",
    "structure.json_schema": "--json-schema",
    "structure.regex": "--regex",
    "structure.json_object": "--json-object",
    "logprobs": "--logprobs",
    "prompt_logprobs": "--prompt-logprobs",
    "sampling.temperature": "--temperature",
    "sampling.top_p": "--top-p",
    "sampling.top_k": "--top-k",
    "sampling.min_p": "--min-p",
    "sampling.seed": "--seed",
    "sampling.repetition_penalty": "--repetition-penalty",
    "sampling.presence_penalty": "--presence-penalty",
    "sampling.frequency_penalty": "--frequency-penalty",
    "sampling.logit_bias": "--logit-bias",
    "stopping.max_tokens": "--max-tokens",
    "stopping.min_tokens": "--min-tokens",
    "stopping.stop": "--stop",
    "stopping.stop_token_ids": "--stop-token",
    "stopping.ignore_eos": "--ignore-eos",
    "stopping.include_stop": "--include-stop",
}
"""What sets a field of the request."""
_PHRASES: Final = {
    "must be at most max_tokens,": "must be at most --max-tokens,",
    "(1 + prompt_logprobs)": "(1 + --prompt-logprobs)",
    "send text or token_ids": "leave out --chat and --system",
}
_FIELD: Final = re.compile(r"(?P<path>[a-z_]+(?:\.[a-z_]+)?)(?P<index>\[\d+\])?(?= )")
_ID_KEY: Final = "octavo-request-id"
"""Initial metadata of a call whose request was accepted."""


def in_flags(message: str, flags: Mapping[str, str] = FLAGS) -> str:
    """A message about a field, such as `sampling.top_p is 2: must be ...`, about the option that sets it."""
    found = _FIELD.match(message)
    if found is None or found["path"] not in flags:
        return message
    rest = message[found.end() :]
    for phrase, ours in _PHRASES.items():
        rest = rest.replace(phrase, ours)
    return f"{flags[found['path']]}{found['index'] or ''}{rest}"


def failure(error: grpc.aio.AioRpcError, answer: Answer, timeout: float | None, told: bool | None) -> str:
    """What went wrong with a call and what to do, for people. `answer`: as far as it had come; `timeout`: seconds;
    `told`: whether a gateway heard that the request is cancelled, where it was given up."""
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout is not None:
        cure = "give it more, or ask for less with --max-tokens; `octavo queue` shows what waits"
        return f"the answer was not whole within --timeout {timeout:g} s and was cancelled: {cure}"
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS):
        return f"{code.name}: {in_flags(error.details() or 'no details')}"
    said = describe(error)
    if CALL_AGAIN not in said and not (code is grpc.StatusCode.UNAVAILABLE and may_go_on(error, answer)):
        return said
    said = said.removesuffix(f"; {CALL_AGAIN}")
    if told:
        return f"{said}; the request was given up, and cancelled unless it had ended by then"
    goes_on = "the request may go on" if told is None else "no gateway heard that it is cancelled, so it may go on"
    return f"{said}; {goes_on}: the same command with --request-id {answer.request_id} gets its answer"


def may_go_on(error: grpc.aio.AioRpcError, answer: Answer) -> bool:
    """Whether the request was accepted, and nobody said that it has ended."""
    accepted = answer.received or any(key == _ID_KEY for key, _ in error.initial_metadata() or ())
    return accepted and not any(each.error for each in answer.choices)
