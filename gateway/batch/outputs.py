"""What a batch's file of results says of a line. Pure.

In OpenAI's form (of batch output files) for lines that are in it; else one object: id, text, token_ids, finish, usage,
or id and error. Several choices of the short form are in `choices`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc

from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.batch.lines import Line

_REASONS: Final[Mapping[int, str]] = {inference_pb2.STOP: "stop", inference_pb2.LENGTH: "length"}
_STATUSES: Final[Mapping[grpc.StatusCode, tuple[int, str]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.CANCELLED: (499, "cancelled"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
"""All others are 500."""


@dataclass(slots=True)
class _Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: int = inference_pb2.FINISH_REASON_UNSPECIFIED


class Answer:
    """What has come of one line."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.failed = False
        """The job has ended with ERROR, or somebody cancelled it: its id will give nothing else."""
        self.cancelled = False
        self.error = ""
        self.usage = inference_pb2.Usage()
        self.choices = [_Choice() for _ in range(max(request.n, 1))]

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Takes in a response of ``gateway.client.Client.generate``."""
        for chunk in response.chunks:
            choice = self.choices[chunk.choice]
            choice.text += chunk.text
            choice.token_ids += chunk.token_ids
            choice.finish = chunk.finish or choice.finish
            if chunk.finish in (inference_pb2.ERROR, inference_pb2.CANCELLED):
                self.failed = True
                self.cancelled = self.cancelled or chunk.finish == inference_pb2.CANCELLED
                self.error = chunk.error or self.error
        if response.HasField("usage"):
            self.usage = response.usage


def answered(line: Line, answer: Answer, request_id: str, model: str, now_s: int) -> dict[str, Any]:
    """The result of a line that has an answer. `model`: as it was asked for; `now_s`: Unix time."""
    usage = {
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": answer.usage.completion_tokens,
        "total_tokens": answer.usage.prompt_tokens + answer.usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.usage.cached_tokens},
    }
    if not line.url:
        choices = [
            {"text": each.text, "token_ids": each.token_ids, "finish": _REASONS[each.finish]} for each in answer.choices
        ]
        told = choices[0] if len(choices) == 1 else {"choices": choices}
        return {"id": line.id, "request_id": request_id, **told, "usage": usage}
    chat = line.url.startswith("/v1/chat")
    body = {
        "id": ("chatcmpl-" if chat else "cmpl-") + request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": now_s,
        "model": model,
        "choices": [_choice(index, each, chat=chat) for index, each in enumerate(answer.choices)],
        "usage": usage,
    }
    return _openai(line, request_id, 200, body)


def failed(line: Line, request_id: str, code: grpc.StatusCode, message: str) -> dict[str, Any]:
    """The result of a line that ended with an error."""
    status, kind = _STATUSES.get(code, (500, "server_error"))
    error = {"message": message, "type": kind, "param": None, "code": code.name.lower()}
    if not line.url:
        return {"id": line.id, "request_id": request_id, "error": error}
    return _openai(line, request_id, status, {"error": error})


def _choice(index: int, choice: _Choice, *, chat: bool) -> dict[str, Any]:
    if not chat:
        return {"index": index, "text": choice.text, "logprobs": None, "finish_reason": _REASONS[choice.finish]}
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": _REASONS[choice.finish]}


def _openai(line: Line, request_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": line.id, "response": response, "error": None}


@dataclass(frozen=True, slots=True)
class Told:
    """What a result says, read back."""

    id: str
    ok: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0


def told(result: Any) -> Told:
    """What a result says. Raises ValueError for what is none of ours."""
    try:
        id_, body = result["id"], result
        ok = result.get("error") is None
        if "custom_id" in result:
            id_, body = result["custom_id"], result["response"]["body"]
            ok = result["response"]["status_code"] == 200
        usage = body["usage"] if ok else {}
        return Told(str(id_), ok, int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no result of a line: {error}") from error
