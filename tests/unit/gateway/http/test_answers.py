"""What is told of answers: piece by piece and whole, for completions and for chats."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.http.answers import Answers, Echo
from gateway.http.translate import Wanted, chat_completion, completion
from octavo.v1.inference_pb2 import (
    CANCELLED,
    ERROR,
    LENGTH,
    STOP,
    Chunk,
    GenerateResponse,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)

BYTES = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b" b"}


def answers_to(wanted: Wanted) -> Answers:
    answers = Answers(wanted, 17)
    answers.id, answers.model, answers.bytes_of = "r", "m", BYTES
    return answers


def chunk(choice: int, text: str, finish: int = 0, **fields: Any) -> Chunk:
    return Chunk(choice=choice, text=text, finish=finish, **fields)


def response(*chunks: Chunk, usage: Usage | None = None) -> GenerateResponse:
    return GenerateResponse(request_id="r", chunks=chunks, usage=usage)


def whole(answers: Answers, *responses: GenerateResponse, prompt: int = 0) -> dict[str, Any]:
    for each in responses:
        answers.keep(answers.take(prompt, each))
    return answers.whole()


def streamed(answers: Answers, *responses: GenerateResponse) -> list[dict[str, Any]]:
    return [event for each in responses for event in answers.events(answers.take(0, each))]


def chat(**fields: Any) -> Wanted:
    return chat_completion({"messages": [{"role": "user", "content": "hi"}], **fields})


USED = Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=5)
TOLD = {
    "prompt_tokens": 3,
    "completion_tokens": 5,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def test_a_completion() -> None:
    answers = answers_to(completion({"prompt": "p", "n": 2}))
    came = (response(chunk(0, "a"), chunk(1, "x", LENGTH)), response(chunk(0, "b", STOP), usage=USED))
    assert whole(answers, *came) == {
        "id": "cmpl-r",
        "object": "text_completion",
        "created": 17,
        "model": "m",
        "choices": [
            {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"},
            {"index": 1, "text": "x", "logprobs": None, "finish_reason": "length"},
        ],
        "usage": TOLD,
    }


def test_choices_of_several_prompts_are_counted_through_and_their_usage_is_added() -> None:
    answers = answers_to(completion({"prompt": ["p", "q"], "n": 2}))
    for prompt in (1, 0):
        came = response(chunk(1, f"{prompt}1", STOP), chunk(0, f"{prompt}0", STOP), usage=USED)
        told = whole(answers, came, prompt=prompt)
    assert [(each["index"], each["text"]) for each in told["choices"]] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    assert told["usage"]["total_tokens"] == 16


def test_a_streamed_completion() -> None:
    wanted = completion({"prompt": "p", "stream": True, "stream_options": {"include_usage": True}})
    answers = answers_to(wanted)
    events = streamed(answers, response(chunk(0, "a"), chunk(0, ""), chunk(0, "b", STOP), usage=USED))
    head = {"id": "cmpl-r", "object": "text_completion", "created": 17, "model": "m"}
    parts = [("a", None), ("b", "stop")]  # nothing is told of a chunk whose text is held back
    assert events == [
        {**head, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}], "usage": None}
        for text, reason in parts
    ]
    assert answers.last_event() == {**head, "choices": [], "usage": TOLD}
    assert answers_to(completion({"prompt": "p", "stream": True})).last_event() is None


def test_a_chat() -> None:
    told = whole(answers_to(chat()), response(chunk(0, "a"), chunk(0, "b", STOP), usage=USED))
    assert (told["id"], told["object"], told["usage"]) == ("chatcmpl-r", "chat.completion", TOLD)
    message = {"role": "assistant", "content": "ab", "refusal": None}
    assert told["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def test_a_streamed_chat() -> None:
    events = streamed(answers_to(chat(stream=True)), response(chunk(0, "a")), response(chunk(0, "", LENGTH)))
    assert all(event["object"] == "chat.completion.chunk" and "usage" not in event for event in events)
    assert [event["choices"] for event in events] == [
        [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}],
    ]


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
CALLS = 'Well.\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'


def called(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_r-0-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


F, G = called(0, "f", '{"x": 1}'), called(1, "g", "{}")


@pytest.mark.parametrize(("parallel", "calls"), [(True, [F, G]), (False, [F])])
def test_calls_are_taken_out_of_the_text(parallel: bool, calls: list[dict[str, Any]]) -> None:
    wanted = chat(**TOOLS, parallel_tool_calls=parallel)
    (choice,) = whole(answers_to(wanted), response(chunk(0, CALLS, STOP)))["choices"]
    message = {"role": "assistant", "content": "Well.", "refusal": None, "tool_calls": calls}
    assert (choice["message"], choice["finish_reason"]) == (message, "tool_calls")
    (choice,) = whole(answers_to(wanted), response(chunk(0, CALLS[6:], LENGTH)))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_tells_what_is_told_whole(seed: int) -> None:
    """However the text is cut into chunks."""
    cuts = random.Random(seed)
    pieces, rest = [], CALLS
    while rest:
        size = cuts.randint(1, 20)
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    came = [response(chunk(0, piece, STOP if at == len(pieces) - 1 else 0)) for at, piece in enumerate(pieces)]
    deltas = [event["choices"][0]["delta"] for event in streamed(answers_to(chat(**TOOLS, stream=True)), *came)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    assert [call for delta in deltas for call in delta.get("tool_calls", [])] == [{"index": 0, **F}, {"index": 1, **G}]


def scored(token: int, logprob: float, *top: tuple[int, float]) -> TokenLogprobs:
    likeliest = [TokenLogprob(token_id=other, logprob=value) for other, value in top]
    return TokenLogprobs(token_id=token, logprob=logprob, top=likeliest)


def test_log_probabilities_of_a_chat() -> None:
    token = scored(2, -0.5, (2, -0.5), (1, float("-inf")))
    (choice,) = whole(answers_to(chat(logprobs=True)), response(chunk(0, "é", STOP, logprobs=[token])))["choices"]
    half = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}
    least = {"token": "a", "logprob": -9999.0, "bytes": [0x61]}
    assert choice["logprobs"] == {"content": [{**half, "top_logprobs": [half, least]}], "refusal": None}
    json.dumps(choice, allow_nan=False)


def test_log_probabilities_of_a_completion_have_the_token_itself_among_the_top() -> None:
    answers = answers_to(completion({"prompt": "p", "stream": True, "logprobs": 1}))
    came = [
        response(chunk(0, "a", logprobs=[scored(1, -1, (4, -0.5))])),
        response(chunk(0, " b", STOP, logprobs=[scored(4, -0.25, (4, -0.25))])),
    ]
    told = [event["choices"][0]["logprobs"] for event in streamed(answers, *came)]
    assert told == [
        {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{" b": -0.5, "a": -1}], "text_offset": [0]},
        {"tokens": [" b"], "token_logprobs": [-0.25], "top_logprobs": [{" b": -0.25}], "text_offset": [1]},
    ]


def test_an_echo_comes_before_every_answer_whichever_comes_first() -> None:
    answers = answers_to(completion({"prompt": "p", "echo": True, "logprobs": 0, "n": 2}))
    answers.echoes[0] = Echo("a b", first=1)
    prompt = [scored(4, -2)]
    came = [
        response(chunk(1, "a", STOP, logprobs=[scored(1, -1)])),
        response(chunk(0, "a", STOP, logprobs=[scored(1, -1)], prompt_logprobs=prompt), usage=USED),
    ]
    for choice in whole(answers, *came)["choices"]:
        assert choice["text"] == "a ba"
        assert choice["logprobs"]["tokens"] == ["a", " b", "a"]
        assert choice["logprobs"]["token_logprobs"] == [None, -2, -1]
        assert choice["logprobs"]["top_logprobs"] == [None, {" b": -2}, {"a": -1}]
        assert choice["logprobs"]["text_offset"] == [0, 1, 3]


def test_of_a_prompt_alone_nothing_else_is_told() -> None:
    answers = answers_to(completion({"prompt": "p", "echo": True, "logprobs": 0, "max_tokens": 0}))
    answers.echoes[0] = Echo("a b", first=1)
    one = chunk(0, "a", LENGTH, logprobs=[scored(1, -1)], prompt_logprobs=[scored(4, -2)])
    told = whole(answers, response(one, usage=Usage(prompt_tokens=2, completion_tokens=1)))
    assert (told["choices"][0]["text"], told["choices"][0]["logprobs"]["tokens"]) == ("a b", ["a", " b"])
    assert (told["choices"][0]["finish_reason"], told["usage"]["completion_tokens"]) == ("length", 0)


def test_ends_that_openais_api_does_not_know_are_not_told_as_answers() -> None:
    answers = answers_to(completion({"prompt": "p", "n": 2}))
    assert answers.take(0, response(chunk(0, "", ERROR), chunk(1, "", CANCELLED, abandoned=True))) == []
    assert answers.cancelled is not None
    assert answers.cancelled.abandoned
