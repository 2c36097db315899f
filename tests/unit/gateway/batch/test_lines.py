"""What a file of a batch may hold, and what is told of one that is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.batch import lines
from gateway.batch.lines import FileError, Line, LineError, checked, parse
from octavo.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, Sampling, Stopping, TokenIds


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def openai(custom_id: str = "a", url: str = "/v1/completions", **body: Any) -> bytes:
    return raw(custom_id=custom_id, method="POST", url=url, body={"prompt": "x", **body})


def test_a_line_in_openais_form() -> None:
    line = openai(
        "a", model="m", prompt="A book", temperature=0, top_p=0.5, stop="\n", seed=-1, user="me", stream=False
    )
    assert parse(3, line) == Line(
        3,
        "a",
        "/v1/completions",
        GenerateRequest(
            model="m",
            n=1,
            text="A book",
            sampling=Sampling(temperature=0, top_p=0.5, seed=2**64 - 1),
            stopping=Stopping(max_tokens=16, stop=["\n"]),
        ),
    )


def test_a_chat_in_openais_form() -> None:
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    line = raw(custom_id="c", url="/v1/chat/completions", body={"messages": messages, "max_completion_tokens": 5})
    found = parse(1, line)
    assert found is not None
    chat = Chat(messages=[ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content="a\nb")])
    assert found.request == GenerateRequest(n=1, chat=chat, stopping=Stopping(max_tokens=5))


def test_lines_in_the_short_form() -> None:
    request = GenerateRequest(
        token_ids=TokenIds(ids=[5, 6]),
        n=2,
        sampling=Sampling(top_k=3, logit_bias={7: -1}),
        stopping=Stopping(ignore_eos=True, stop_token_ids=[1]),
    )
    plain = GenerateRequest(n=1, text="x", stopping=Stopping())
    fields = {"n": 2, "top_k": 3, "logit_bias": {"7": -1}, "ignore_eos": True, "stop_token_ids": [1]}
    assert parse(1, raw(id="t", token_ids=[5, 6], **fields)) == Line(1, "t", "", request)
    assert parse(1, raw(id="p", prompt="x")) == Line(1, "p", "", plain)
    assert parse(1, b" \r\n") is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "is no JSON: "),
        (b"\xff", "is no JSON: "),
        (b"[" * 100_000, "is no JSON: "),
        (b"[]", "must be a JSON object"),
        (raw(prompt="x"), "id is not set: must be text of 1 to 256 characters"),
        (raw(id=5, prompt="x"), "id is int: must be text of 1 to 256 characters"),
        (raw(id="", prompt="x"), "id is '': must be text of 1 to 256 characters"),
        (raw(id="a\ud800", prompt="x"), r"id is 'a\ud800': must have no characters that can't be printed"),
        (raw(id="a"), "prompt is not set: one of prompt, messages and token_ids is needed"),
        (raw(id="a", prompt="x", messages=[]), "messages is prompt and messages together: one of"),
        (raw(id="a", prompt=None), "prompt is NoneType: must be text or token ids"),
        (raw(id="a", prompt=""), "prompt is empty: must have at least 1 character"),
        (raw(id="a", prompt="\ud800"), "prompt is text with half a character: must be valid Unicode"),
        (raw(id="a", token_ids=[-1]), "prompt is a list of 1: must be text, or at least 1 token id"),
        (raw(id="a", token_ids=[True]), "prompt[0] is bool: must be text or token ids"),
        (raw(id="a", token_ids="x"), "prompt is 'x': must be a list of token ids"),
        (raw(id="a", prompt="x", temperature="1"), "temperature is '1': input should be a valid number"),
        (raw(id="a", prompt="x", temperature=True), "temperature is True: input should be a valid number"),
        (raw(id="a", prompt="x", temperature=200), "temperature is 200: must be 0 to 100"),
        (raw(id="a", prompt="x", n=0), "n is 0: must be at least 1"),
        (raw(id="a", prompt="x", n=33), "n is 33: must be at most 32"),
        (raw(id="a", prompt="x", max_tokens=0), "max_tokens is 0: must be at least 1"),
        (
            raw(id="a", prompt="x", maxtokens=5),
            "maxtokens is set: is no field that is taken here; these are: cache_salt",
        ),
        (raw(id="a", messages=[{"role": "user", "text": "x"}]), "messages[0].content is null: must be text"),
        (raw(id="a", messages=[]), "messages is empty: must have at least 1 message"),
        (raw(custom_id="a", url="/v1/embeddings", body={}), "url is '/v1/embeddings': must be /v1/completions or "),
        (raw(custom_id="a", method="GET", url="/v1/completions", body={}), "method is 'GET': must be POST"),
        (raw(custom_id="a", url="/v1/completions"), "body must be a JSON object"),
        (raw(custom_id="a", url="/v1/completions", body={}, x=1), "'x' is no part of a line"),
        (openai(stream=True), "stream is true: must be false"),
        (openai(logprobs=3), "logprobs is set: is not taken in batches; leave it out"),
        (openai(echo=True), "echo is set: is not taken in batches; leave it out"),
        (openai(best_of=2), "best_of is 2: is not taken here; ask for n answers and choose"),
        (openai(prompt=["a", "b"]), "prompt is 2 prompts: must be one; give each a line of its own"),
    ],
)
def test_lines_that_are_refused(line: bytes, told: str) -> None:
    with pytest.raises(LineError) as refused:
        parse(1, line)
    assert str(refused.value).startswith(told)


def test_a_line_of_more_than_4_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_REQUEST_BYTES", 10)
    with pytest.raises(LineError, match="has 28 bytes: must have at most 10"):
        parse(1, raw(id="a", prompt="xx"))


def refused(*given: bytes) -> list[str]:
    with pytest.raises(FileError) as error:
        list(checked(given))
    return str(error.value).splitlines()


def test_all_that_is_wrong_is_told_with_its_line() -> None:
    assert refused(raw(id="a", prompt="x"), b"{}\n", b"\n", raw(id="a", prompt="y"), b"[]") == [
        "line 2: id is not set: must be text of 1 to 256 characters",
        "line 4: id 'a' is that of line 1 too: each must be another",
        "line 5: must be a JSON object",
    ]


def test_ids_of_both_forms_are_one_kind() -> None:
    assert refused(openai("a"), raw(id="a", prompt="x")) == [
        "line 2: id 'a' is that of line 1 too: each must be another"
    ]


def test_an_empty_file() -> None:
    assert refused(b"\n") == ["there is no line in it"]


def test_no_more_than_so_many_errors_are_told() -> None:
    told = refused(*[b"[]"] * 30)
    assert len(told) == 21
    assert told[-1] == "what follows was not looked at"


@pytest.mark.parametrize(("name", "limit"), [("MAX_LINES", 2), ("MAX_BYTES", 60)])
def test_bounds_of_a_file(monkeypatch: pytest.MonkeyPatch, name: str, limit: int) -> None:
    monkeypatch.setattr(lines, name, limit)
    given = [raw(id=each, prompt="x") for each in "abc"]
    assert refused(*given) == [
        f"line 3: is beyond {limit} {'lines' if name == 'MAX_LINES' else 'bytes'}: split the file",
        "what follows was not looked at",
    ]


def test_lines_for_another_endpoint_are_refused() -> None:
    with pytest.raises(FileError) as error:
        list(checked([openai("a"), raw(id="b", prompt="x")], "/v1/chat/completions"))
    assert str(error.value).splitlines() == [
        "line 1: url is /v1/completions: must be the batch's endpoint, /v1/chat/completions",
        "line 2: url is not set: must be the batch's endpoint, /v1/chat/completions",
    ]


def test_lines_are_kept_as_they_are() -> None:
    given = [raw(id="a", prompt="ä"), b"\n", openai("b")]
    assert [(kept, line.number, line.id) for kept, line in checked(given)] == [
        (given[0], 1, "a"),
        (given[2], 3, "b"),
    ]
