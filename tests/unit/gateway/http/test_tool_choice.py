"""Answers that must be calls: what they are kept to, and how they are read."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import AdmissionError
from gateway.http.answers import Answers
from gateway.http.tool_calls import CallReader, ToolCall
from gateway.http.translate import chat_completion
from kvstore.structure import grammar_of, limits, refusal
from octavo.v1.inference_pb2 import LENGTH, STOP, Chunk, GenerateResponse

CITY = {"$defs": {"city": {"type": "string", "enum": ["Rome"]}}, "properties": {"city": {"$ref": "#/$defs/city"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
BODY = {"messages": [{"role": "user", "content": "a"}], "tools": [CLOCK, WEATHER]}
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "clock", "arguments": {}}'


def fits(choice: Any, text: str) -> bool:
    """Whether an answer can be this text, whole."""
    from llguidance import LLMatcher, LLTokenizer

    structure = chat_completion({**BODY, "tool_choice": choice}).requests[0].structure
    assert refusal(structure) == ""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar_of(structure), limits=limits())
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "fit"), [("required", (NOW, ROME)), (named("weather"), (ROME,)), (named("clock"), (NOW,))]
)
def test_an_answer_is_a_call_of_what_may_be_called(choice: Any, fit: tuple[str, ...]) -> None:
    others = (ROME.replace("Rome", "Paris"), NOW.replace("clock", "watch"), "Hi", NOW.replace("{}", '{"a": 1}'))
    assert [text for text in (NOW, ROME, *others) if fits(choice, text)] == list(fit)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_else_it_has_no_form(choice: str | None) -> None:
    wanted = chat_completion({**BODY, "tool_choice": choice})
    assert (wanted.must_call, wanted.requests[0].HasField("structure")) == (False, False)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": "some"}, "tool_choice is 'some': must be none, auto, required, or a function with its name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice is set: must be none, auto, required, or a function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice is set: must be none, auto, required, or a function"),
        ({"tool_choice": named("watch")}, "tool_choice.function.name is 'watch': must be that of one of the tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice is 'required': needs tools"),
        ({"tool_choice": named("clock"), "tools": None}, "tool_choice is set: needs tools"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice is set: an answer has one form; leave the other one out",
        ),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "tools[0].function.parameters is int: must be a JSON schema",
        ),
    ],
)
def test_choices_that_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(AdmissionError) as refused:
        chat_completion({**BODY, **fields})
    assert str(refused.value).startswith(told)


def test_marks_in_arguments_are_no_marks() -> None:
    text = '{"name": "f", "arguments": {"a": "</tool_call>"}}'
    reader = CallReader(alone=True)
    assert [each for at in range(len(text)) for each in reader.read(text[at])] == []
    assert reader.end() == [ToolCall("f", '{"a": "</tool_call>"}')]


def answered(text: str, finish: Any) -> dict[str, Any]:
    answers = Answers(chat_completion({**BODY, "tool_choice": "required"}), 5)
    response = GenerateResponse(chunks=[Chunk(text=text[:9]), Chunk(text=text[9:], finish=finish)])
    answers.keep(answers.take(0, response))
    (choice,) = answers.whole()["choices"]
    return dict(choice)


def test_the_answer_has_the_call() -> None:
    choice = answered(ROME, STOP)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_a_call_that_was_cut_off_is_text() -> None:
    choice = answered(ROME[:-1], LENGTH)
    assert (choice["message"]["content"], choice["finish_reason"]) == (ROME[:-1], "length")
    assert "tool_calls" not in choice["message"]
