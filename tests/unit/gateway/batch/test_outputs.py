"""Results as they are written, and read back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from gateway.batch.lines import Line
from gateway.batch.outputs import Answer, Told, failed, told
from octavo.v1.inference_pb2 import CANCELLED, ERROR, LENGTH, STOP, Chunk, GenerateRequest, GenerateResponse, Usage


def line(url: str = "", n: int = 1) -> Line:
    return Line(4, "mine", url, GenerateRequest(text="x", n=n))


def result(asked: Line) -> dict[str, Any]:
    n = asked.request.n
    answer = Answer(asked, 9)
    answer.add(GenerateResponse(chunks=[Chunk(choice=0, token_ids=[5], text="a")]))
    last = [Chunk(choice=0, token_ids=[6, 7], text="b", finish=STOP)]
    if n == 2:
        last.append(Chunk(choice=1, token_ids=[8], text="c", finish=LENGTH))
    answer.add(GenerateResponse(chunks=last, usage=Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=4)))
    return answer.result("r.4", "m")


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def test_the_short_form() -> None:
    assert result(line()) == {
        "id": "mine",
        "request_id": "r.4",
        "text": "ab",
        "token_ids": [5, 6, 7],
        "finish": "stop",
        "usage": USAGE,
    }


def test_several_answers_in_the_short_form() -> None:
    several = result(line(n=2))
    assert several["choices"] == [
        {"text": "ab", "token_ids": [5, 6, 7], "finish": "stop"},
        {"text": "c", "token_ids": [8], "finish": "length"},
    ]
    assert "text" not in several


def test_a_completion_in_openais_form() -> None:
    assert result(line("/v1/completions")) == {
        "id": "batch_req_r.4",
        "custom_id": "mine",
        "response": {
            "status_code": 200,
            "request_id": "r.4",
            "body": {
                "id": "cmpl-r.4",
                "object": "text_completion",
                "created": 9,
                "model": "m",
                "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}],
                "usage": USAGE,
            },
        },
        "error": None,
    }


def test_a_chat_in_openais_form() -> None:
    body = result(line("/v1/chat/completions"))["response"]["body"]
    assert (body["id"], body["object"]) == ("chatcmpl-r.4", "chat.completion")
    message = {"role": "assistant", "content": "ab", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def test_errors() -> None:
    error = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert failed(line(), "r.4", invalid, "no") == {"id": "mine", "request_id": "r.4", "error": error}
    assert failed(line("/v1/completions"), "r.4", invalid, "no") == {
        "id": "batch_req_r.4",
        "custom_id": "mine",
        "response": {"status_code": 400, "request_id": "r.4", "body": {"error": error}},
        "error": None,
    }
    assert failed(line("/v1/completions"), "r.4", grpc.StatusCode.INTERNAL, "no")["response"]["status_code"] == 500


@pytest.mark.parametrize("url", ["", "/v1/completions", "/v1/chat/completions"])
def test_they_are_read_back(url: str) -> None:
    assert told(result(line(url))) == Told("mine", True, 3, 4)
    assert told(failed(line(url), "r.4", grpc.StatusCode.NOT_FOUND, "no")) == Told("mine", False)


@pytest.mark.parametrize("junk", [None, [], "x", {}, {"id": "a"}, {"id": "a", "custom_id": "b", "response": None}])
def test_what_is_no_result(junk: object) -> None:
    with pytest.raises(ValueError, match="no result of a line"):
        told(junk)


@pytest.mark.parametrize("finish", [ERROR, CANCELLED])
def test_an_answer_that_ended_otherwise(finish: int) -> None:
    answer = Answer(line(), 9)
    assert not answer.failed
    answer.add(GenerateResponse(chunks=[Chunk(finish=finish, error="why")]))  # type: ignore[arg-type]
    assert answer.failed
