"""What a batch's file of results says of a line. Pure.

In OpenAI's form (of batch output files) for lines that are in it; else one object: id, text, token_ids, finish, usage,
or id and error. Several choices of the short form are in `choices`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.errors import Status
from gateway.http.answers import Answers
from gateway.http.problems import problem_of
from gateway.http.translate import Wanted
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    import grpc

    from gateway.batch.lines import Line


class Answer:
    """What has come of one line."""

    def __init__(self, line: Line, now_s: int) -> None:
        """`now_s`: Unix time."""
        self.failed = False
        """The job has ended with ERROR, or somebody cancelled it: its id will give nothing else."""
        self.cancelled = False
        self.token_ids: list[list[int]] = [[] for _ in range(max(line.request.n, 1))]
        self._line = line
        self._answers = Answers(Wanted(line.chat, (line.request,)), now_s)

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Takes in a response of ``gateway.client.Client.generate``."""
        for chunk in response.chunks:
            self.token_ids[chunk.choice] += chunk.token_ids
            if chunk.finish in (inference_pb2.ERROR, inference_pb2.CANCELLED):
                self.failed = True
                self.cancelled = self.cancelled or chunk.finish == inference_pb2.CANCELLED
        self._answers.keep(self._answers.take(0, response))

    def result(self, request_id: str, model: str) -> dict[str, Any]:
        """The line's result, once the answer is whole. `model`: as it was asked for."""
        self._answers.id, self._answers.model = request_id, model
        body = self._answers.whole()
        if self._line.url:
            return _openai(self._line, request_id, 200, body)
        choices = [
            {"text": each["text"], "token_ids": ids, "finish": each["finish_reason"]}
            for each, ids in zip(body["choices"], self.token_ids, strict=True)
        ]
        told = choices[0] if len(choices) == 1 else {"choices": choices}
        return {"id": self._line.id, "request_id": request_id, **told, "usage": body["usage"]}


def failed(line: Line, request_id: str, code: grpc.StatusCode, message: str) -> dict[str, Any]:
    """The result of a line that ended with an error."""
    problem = problem_of(Status(code, message), chat=line.chat)
    body = json.loads(problem.body())
    if not line.url:
        return {"id": line.id, "request_id": request_id, **body}
    return _openai(line, request_id, problem.status, body)


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


def told_raw(raw: bytes) -> Told:
    """What a line of a file of results says. Raises ValueError for what is none of ours."""
    return told(json.loads(raw))
