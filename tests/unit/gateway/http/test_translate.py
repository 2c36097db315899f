"""From OpenAI's JSON to the protocol."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import AdmissionError
from gateway.http.translate import MAX_PROMPTS, Wanted, chat_completion, completion
from octavo.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    Sampling,
    Stopping,
    TokenIds,
    ToolCall,
)


def of(body: dict[str, Any], *, chat: bool = False) -> Wanted:
    return chat_completion(body) if chat else completion(body)


def refusal(body: dict[str, Any], *, chat: bool = False) -> str:
    with pytest.raises(AdmissionError) as caught:
        of(body, chat=chat)
    return str(caught.value)


HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_completion_with_nothing_said_has_openais_defaults() -> None:
    (request,) = completion({"prompt": "a"}).requests
    assert request == GenerateRequest(text="a", n=1, stopping=Stopping(max_tokens=16))


def test_all_that_shapes_an_answer_is_handed_on() -> None:
    body = {
        "model": "m",
        "prompt": [3, 4],
        "n": 2,
        "max_tokens": 5,
        "stop": "x",
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100},
        "seed": -1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [8, 9],
        "include_stop_str_in_output": True,
        "cache_salt": "s",
        "logprobs": 3,
        "user": "u",
        "store": True,
        "unheard_of": {"a": 1},
    }
    (request,) = completion(body).requests
    assert request == GenerateRequest(
        model="m",
        token_ids=TokenIds(ids=[3, 4]),
        n=2,
        cache_salt="s",
        logprobs=3,
        sampling=Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=0,
            min_p=0.125,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={7: -100},
            seed=2**64 - 1,
        ),
        stopping=Stopping(
            max_tokens=5, min_tokens=2, stop=["x"], stop_token_ids=[8, 9], ignore_eos=True, include_stop=True
        ),
    )


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a"] * MAX_PROMPTS, ["a"] * MAX_PROMPTS),
    ],
)
def test_prompts_are_text_or_token_ids_one_or_several(prompt: Any, inputs: list[Any]) -> None:
    requests = completion({"prompt": prompt}).requests
    found = [each.text if each.WhichOneof("input") == "text" else list(each.token_ids.ids) for each in requests]
    assert found == inputs


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "prompt is 0 prompts: must be 1 to 128"),
        (["a"] * 129, "prompt is 129 prompts: must be 1 to 128"),
        (None, "prompt is NoneType: must be text or token ids, all prompts alike"),
        ({}, "prompt is dict: must be text or token ids, all prompts alike"),
        ([True], "prompt[0] is bool: must be text or token ids, all prompts alike"),
        (["a", [1]], "prompt[1] is list: must be text or token ids, all prompts alike"),
        ([[1], "a"], "prompt[1] is str: must be text or token ids, all prompts alike"),
        ([1, "a"], "prompt is a list of 2: must be text, or at least 1 token id"),
        ([1, True], "prompt is a list of 2: must be text, or at least 1 token id"),
        ([[1], []], "prompt[1] is a list of 0: must be text, or at least 1 token id"),
        ([-1], "prompt is a list of 1: must be text, or at least 1 token id"),
        ([2**32], "prompt is a list of 1: must be text, or at least 1 token id"),
        ("a\ud800", "prompt is text with half a character: must be valid Unicode"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, told: str) -> None:
    assert refusal({"prompt": prompt}) == told


def test_an_echo_asks_for_the_prompts_log_probabilities_too() -> None:
    wanted = completion({"prompt": "a", "echo": True, "logprobs": 0})
    (request,) = wanted.requests
    assert (wanted.echo, wanted.logprobs, wanted.output) == (True, True, True)
    assert (request.logprobs, request.prompt_logprobs) == (0, 0)
    assert request.HasField("prompt_logprobs")
    assert not completion({"prompt": "a", "echo": True}).requests[0].HasField("prompt_logprobs")


def test_a_prompt_alone_may_be_asked_for() -> None:
    wanted = completion({"prompt": "a", "echo": True, "max_tokens": 0})
    assert (wanted.output, wanted.requests[0].stopping.max_tokens) == (False, 1)
    assert completion({"prompt": "a", "max_tokens": 0}).requests[0].stopping.max_tokens == 0  # refused later


def test_a_chat_with_nothing_said_may_use_the_whole_context() -> None:
    wanted = chat_completion(HI)
    assert wanted.requests == (
        GenerateRequest(
            chat=Chat(messages=[ChatMessage(role="user", content="hi")]),
            n=1,
            stopping=Stopping(),
        ),
    )
    assert (wanted.chat, wanted.stream, wanted.tools, wanted.logprobs) == (True, False, False, False)


def test_messages_of_all_kinds() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "d", "name": "f"},
        ],
        "max_tokens": 4,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    (request,) = chat_completion(body).requests
    assert list(request.chat.messages) == [
        ChatMessage(role="system", content="a\nb"),
        ChatMessage(role="assistant", tool_calls=[ToolCall(id="c", name="f", arguments="{}")]),
        ChatMessage(role="tool", content="d", tool_call_id="c", name="f"),
    ]
    assert (request.stopping.max_tokens, request.logprobs) == (5, 2)


TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"z": 1, "a": 2}}}


@pytest.mark.parametrize(("choice", "taken"), [(None, True), ("auto", True), ("none", False)])
def test_tools_are_handed_on_as_they_are_written(choice: str | None, taken: bool) -> None:
    wanted = chat_completion({**HI, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False})
    assert (wanted.tools, wanted.parallel_calls) == (taken, False)
    told = '{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"z": 1, "a": 2}}}'
    assert list(wanted.requests[0].chat.tools) == [told] * taken


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": "1"}, "temperature is '1': input should be a valid number"),
        ({"n": True}, "n is True: input should be a valid integer"),
        ({"n": 0}, "n is 0: must be at least 1"),
        ({"n": -1}, "n is -1: input should be greater than or equal to 0"),
        ({"max_tokens": 2**32}, "max_tokens is 4294967296: input should be less than 4294967296"),
        ({"seed": 2**64}, "seed is 18446744073709551616: input should be less than 18446744073709551616"),
        ({"logit_bias": {"x": 1}}, "logit_bias is for 'x': must be for token ids"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias is for '4294967296': must be for token ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options is set: needs stream: true"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1] is 'a': input should be a valid integer"),
        ({"stop": 5}, "stop is 5: input should be a valid string"),
        ({"stop": ["a"] * 17}, "stop is set: list should have at most 16 items after validation, not 17"),
        ({"model": "\udfff"}, "model is text with half a character: must be valid Unicode"),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_what_is_wrong_is_told_by_name(fields: dict[str, Any], told: str, chat: bool) -> None:
    assert refusal({**({} if chat else {"prompt": "a"}), **(HI if chat else {}), **fields}, chat=chat) == told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "messages is empty: must have at least 1 message"),
        ({"messages": [{"content": "a"}]}, "messages[0].role is not set: field required"),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content is null: must be text, unless the message has tool_calls",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type is 'image_url': must be text, with text",
        ),
        ({"top_logprobs": 2}, "top_logprobs is 2: needs logprobs: true"),
        ({"tool_choice": "auto"}, "tool_choice is 'auto': needs tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type is 'custom': input should be 'function'"),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml': input should be 'text', 'json_object'"),
    ],
)
def test_what_is_wrong_with_a_chat_is_told_by_name(fields: dict[str, Any], told: str) -> None:
    assert refusal({**HI, **fields}, chat=True).startswith(told)


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("best_of", 2, [1, None]),
        ("suffix", "b", ["", None]),
        ("max_completion_tokens", 5, [None]),
        ("response_format", {"type": "json_object"}, [{"type": "text"}]),
        ("guided_choice", ["a"], [None]),
        ("skip_special_tokens", False, [True, None]),
        ("typical_p", 0.5, [1, 1.0]),
    ],
)
def test_fields_that_would_change_a_completion_are_refused(name: str, value: Any, harmless: list[Any]) -> None:
    assert refusal({"prompt": "a", name: value}).startswith(f"{name} is ")
    for each in harmless:
        completion({"prompt": "a", name: each})


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("functions", [{"name": "f"}], [[], None]),
        ("modalities", ["text", "audio"], [["text"], None]),
        ("reasoning_effort", "high", ["none", None]),
        ("chat_template_kwargs", {"enable_thinking": False}, [{}, None]),
        ("add_generation_prompt", False, [True]),
        ("prompt", "a", [None]),
    ],
)
def test_fields_that_would_change_a_chat_are_refused(name: str, value: Any, harmless: list[Any]) -> None:
    assert refusal({**HI, name: value}, chat=True).startswith(f"{name} is ")
    for each in harmless:
        chat_completion({**HI, name: each})


def test_streams() -> None:
    wanted = completion({"prompt": "a", "stream": True, "stream_options": {"include_usage": True}})
    assert (wanted.stream, wanted.include_usage) == (True, True)
    assert not completion({"prompt": "a", "stream": True}).include_usage
