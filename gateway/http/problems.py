"""What went wrong, as OpenAI's API tells it: a status, and {"error": {"message", "type", "param", "code"}}. Pure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc

from gateway.errors import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_Code = grpc.StatusCode

_STATUSES: Final[dict[grpc.StatusCode, tuple[int, str]]] = {
    _Code.INVALID_ARGUMENT: (400, INVALID),
    _Code.OUT_OF_RANGE: (400, INVALID),
    _Code.FAILED_PRECONDITION: (400, INVALID),
    _Code.UNAUTHENTICATED: (401, "authentication_error"),
    _Code.PERMISSION_DENIED: (403, "permission_error"),
    _Code.NOT_FOUND: (404, INVALID),
    _Code.ALREADY_EXISTS: (409, INVALID),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    _Code.CANCELLED: (499, "cancelled"),
    _Code.UNIMPLEMENTED: (501, _SERVER),
    _Code.UNAVAILABLE: (503, _SERVER),
    _Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
"""All others are 500."""

_NAMES: Final = {
    "request_id": "X-Request-Id",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "stopping.include_stop": "include_stop_str_in_output",
    "prompt_logprobs": "logprobs",
    "structure.json_schema": "response_format",
    "structure.json_object": "response_format",
    "structure.regex": "structured_outputs.regex",
}
"""Fields of the protocol under other names; `stopping.` and `sampling.` are left out besides."""
_OF_COMPLETIONS: Final = {
    "structure.json_schema": "structured_outputs.json",
    "structure.json_object": "structured_outputs.json_object",
}
"""These have no response_format."""
_OF_PROMPTS: Final = ("prompt", "text", "token_ids", "token_ids.ids", "input")
_FIELD: Final = re.compile(r"(?P<path>[a-z_]+(?:\.[a-z_]+)*)(?P<rest>(?:\[\d+\](?:\.[a-z_]+)*)*)(?= is | is$)")


@dataclass(frozen=True, slots=True)
class Problem:
    """An HTTP request's failure."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """JSON, in UTF-8."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()


class Failed(Exception):  # noqa: N818 (says what happened)
    """The request can't be served."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def aborted(code: grpc.StatusCode, message: str, trailing: Iterable[tuple[str, Any]], *, chat: bool) -> Failed:
    """What a call that ended like this is to an HTTP client. `trailing`: as ``gateway.rpc.abort`` makes it."""
    waits = [int(value) for name, value in trailing if name == "retry-after-ms"]
    return Failed(problem_of(Status(code, message, waits[0] if waits else None), chat=chat))


def problem_of(status: Status, *, chat: bool) -> Problem:
    """The same failure with HTTP's status, and in the words of OpenAI's API."""
    number, kind = _STATUSES.get(status.code, (500, _SERVER))
    headers = {}
    if status.retry_after_ms is not None:
        headers = {
            "retry-after": str(max(1, math.ceil(status.retry_after_ms / 1000))),
            "retry-after-ms": str(status.retry_after_ms),
        }
    if status.code is _Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    message, param = status.message, None
    if status.code is _Code.INVALID_ARGUMENT:
        message, param = in_openai(message, chat=chat)
    return Problem(number, message, kind, param, _code(status, message), headers)


def in_openai(message: str, *, chat: bool) -> tuple[str, str | None]:
    """A message about a field of the protocol, such as `sampling.top_p is 2: must be ...`, with the name that the field
    has in OpenAI's API, and that name. `chat`: for chat completions."""
    found = _FIELD.match(message)
    if found is None or found["path"] == "request":  # all of it
        return message, None
    path = found["path"]
    own = None if chat else _OF_COMPLETIONS.get(path)
    name = own or _NAMES.get(path) or path.removeprefix("stopping.").removeprefix("sampling.")
    if path in _OF_PROMPTS:
        name = "messages" if chat else "prompt"
    elif chat and path == "logprobs":
        name = "top_logprobs"
    param = name + found["rest"]
    return param + message[found.end() :], param


def _code(status: Status, message: str) -> str | None:
    if status.code is _Code.NOT_FOUND and message.startswith("model "):
        return "model_not_found"
    if status.code is _Code.INVALID_ARGUMENT:
        # Some clients shorten the conversation by themselves when they read this.
        return "context_length_exceeded" if "as the context of" in message else None
    if status.code is _Code.UNAUTHENTICATED:
        return "invalid_api_key"
    if status.code is _Code.RESOURCE_EXHAUSTED:
        return "rate_limit_exceeded"
    return status.code.name.lower()
