"""Failures in the words of OpenAI's API."""

from __future__ import annotations

import json

import grpc
import pytest

from gateway.errors import Status
from gateway.http.bodies import parsed
from gateway.http.problems import Failed, Problem, aborted, in_openai, problem_of

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "status", "kind", "told"),
    [
        (Code.INVALID_ARGUMENT, 400, "invalid_request_error", None),
        (Code.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"),
        (Code.PERMISSION_DENIED, 403, "permission_error", "permission_denied"),
        (Code.NOT_FOUND, 404, "invalid_request_error", "not_found"),
        (Code.ALREADY_EXISTS, 409, "invalid_request_error", "already_exists"),
        (Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "rate_limit_exceeded"),
        (Code.INTERNAL, 500, "server_error", "internal"),
        (Code.DATA_LOSS, 500, "server_error", "data_loss"),
        (Code.UNAVAILABLE, 503, "server_error", "unavailable"),
        (Code.DEADLINE_EXCEEDED, 504, "timeout_error", "deadline_exceeded"),
    ],
)
def test_statuses(code: grpc.StatusCode, status: int, kind: str, told: str | None) -> None:
    problem = problem_of(Status(code, "why"), chat=False)
    assert (problem.status, problem.type, problem.code) == (status, kind, told)
    assert json.loads(problem.body()) == {"error": {"message": "why", "type": kind, "param": None, "code": told}}


@pytest.mark.parametrize(("wait_ms", "seconds"), [(1, "1"), (1000, "1"), (1001, "2")])
def test_when_to_come_back_is_told_in_seconds_and_milliseconds(wait_ms: int, seconds: str) -> None:
    problem = aborted(Code.UNAVAILABLE, "why", [("retry-after-ms", str(wait_ms))], chat=False).problem
    assert problem.headers == {"retry-after": seconds, "retry-after-ms": str(wait_ms)}
    assert aborted(Code.UNAVAILABLE, "why", (), chat=False).problem.headers == {}


def test_who_is_not_known_is_told_how_to_say_it() -> None:
    assert problem_of(Status(Code.UNAUTHENTICATED, "why"), chat=False).headers == {"www-authenticate": "Bearer"}


def test_codes_that_clients_look_for() -> None:
    unknown = Status(Code.NOT_FOUND, "model 'x' is not served; served: 'y'")
    assert problem_of(unknown, chat=True).code == "model_not_found"
    long = Status(Code.INVALID_ARGUMENT, "prompt is 9 tokens: must be at most 7, as the context of 8 holds ...")
    assert (problem_of(long, chat=True).code, problem_of(long, chat=True).param) == (
        "context_length_exceeded",
        "messages",
    )


@pytest.mark.parametrize(
    ("message", "completions", "chats"),
    [
        ("sampling.top_p is 2: must be", "top_p", "top_p"),
        ("stopping.max_tokens is 0: must be", "max_tokens", "max_tokens"),
        ("stopping.stop[3] is '': must have", "stop[3]", "stop[3]"),
        ("sampling.logit_bias[7] is 200: must be", "logit_bias[7]", "logit_bias[7]"),
        ("text is empty: must have", "prompt", "messages"),
        ("token_ids.ids[4] is 999: must be", "prompt[4]", "messages[4]"),
        ("prompt is 5000 tokens: must be", "prompt", "messages"),
        ("chat.messages[2].role is 'x': must be", "messages[2].role", "messages[2].role"),
        ("messages[2].content[0].type is 'x': must be", "messages[2].content[0].type", "messages[2].content[0].type"),
        ("chat.tools is set: the model's", "tools", "tools"),
        ("logprobs is 21: must be", "logprobs", "top_logprobs"),
        ("structure.json_schema is '1': must be", "structured_outputs.json", "response_format"),
        ("structure.json_object is false: must be", "structured_outputs.json_object", "response_format"),
        ("structure.regex is '(': must be", "structured_outputs.regex", "structured_outputs.regex"),
        ("request_id is 'a b': must be", "X-Request-Id", "X-Request-Id"),
    ],
)
def test_fields_have_openais_names(message: str, completions: str, chats: str) -> None:
    rest = message[message.index(" is ") :]
    assert in_openai(message, chat=False) == (completions + rest, completions)
    assert in_openai(message, chat=True) == (chats + rest, chats)


def test_a_message_about_no_field_stays_as_it_is() -> None:
    assert in_openai("No such thing", chat=False) == ("No such thing", None)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "the body is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "the body is not valid JSON: Expecting property name"),
        (b'{"a": NaN}', "the body is not valid JSON: NaN is no JSON"),
        (b'{"a": -Infinity}', "the body is not valid JSON: -Infinity is no JSON"),
        (b'{"a": "\xff"}', "the body is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"\xef\xbb\xbf{}", "the body is not valid JSON: Unexpected UTF-8 BOM"),
        ('{"a": 1}'.encode("utf-16"), "the body is not valid JSON: 'utf-8' codec"),
        (b"[1]", "the body must be a JSON object"),
        (b"[" * 1_000_000, "the body is nested too deeply"),
        (b'{"a":' * 100_000, "the body is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the body is not valid JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_json_object_is_told(body: bytes, told: str) -> None:
    with pytest.raises(Failed) as caught:
        parsed(body)
    problem = caught.value.problem
    assert (problem.status, problem.type) == (400, "invalid_request_error")
    assert problem.message.startswith(told)


def test_a_problem_is_json_in_any_language() -> None:
    assert json.loads(Problem(400, "ü\n\"'").body())["error"]["message"] == "ü\n\"'"
