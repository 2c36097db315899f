"""Chats as templates take them."""

from __future__ import annotations

import pytest

from gateway.admission import MAX_TOOLS, check
from gateway.chats import MAX_LEVELS, masked, messages_of, tools_of
from gateway.errors import AdmissionError
from octavo.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, ToolCall


def test_a_message_has_what_is_set_of_it() -> None:
    chat = Chat(
        messages=[
            ChatMessage(role="user", content="a"),
            ChatMessage(role="assistant", tool_calls=[ToolCall(id="c", name="f", arguments='{"x": [1]}')]),
            ChatMessage(role="tool", content="b", tool_call_id="c", name="f"),
        ]
    )
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    assert messages_of(chat) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "b", "tool_call_id": "c", "name": "f"},
    ]


def test_tools_keep_the_order_of_their_keys() -> None:
    assert [list(tool) for tool in tools_of(Chat(tools=['{"b": 1, "a": {}}']))] == [["b", "a"]]


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "1", "{", "[" * 100_000, nested(MAX_LEVELS + 1), nested(900)),
        *('{"a": "\\ud800"}', '{"a": ["\\udc00x"]}', '{"\\ud83d": 1}'),
    ],
)
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(
        AdmissionError, match=r"^chat\.tools\[1\] is .*: must be a JSON object of valid Unicode, at most 128 lev"
    ):
        tools_of(Chat(tools=["{}", text]))
    message = ChatMessage(role="assistant", tool_calls=[ToolCall(arguments="{}"), ToolCall(arguments=text)])
    with pytest.raises(AdmissionError, match=r"^chat\.messages\[0\]\.tool_calls\[1\]\.arguments is "):
        messages_of(Chat(messages=[message]))


def test_objects_may_be_deep_and_have_any_whole_character() -> None:
    tools = tools_of(Chat(tools=[nested(MAX_LEVELS), '{"a": "\\ud83d\\ude00"}']))
    assert masked(tools, str.upper)[1] == {"A": "\U0001f600"}


def test_there_are_only_so_many_tools_and_calls() -> None:
    message = ChatMessage(role="user")
    check(GenerateRequest(chat=Chat(messages=[message], tools=["{}"] * MAX_TOOLS)))
    with pytest.raises(AdmissionError, match=r"^chat\.tools is 129 tools: must be at most 128$"):
        check(GenerateRequest(chat=Chat(messages=[message], tools=["{}"] * 129)))
    message = ChatMessage(role="user", tool_calls=[ToolCall()] * 129)
    with pytest.raises(AdmissionError, match=r"^chat\.messages\[0\]\.tool_calls is 129 calls: must be at most 128$"):
        check(GenerateRequest(chat=Chat(messages=[message])))


def test_every_text_of_a_value_is_masked() -> None:
    assert masked({"a": ["a", 1, None, {"a": True}]}, lambda text: text * 2) == {"aa": ["aa", 1, None, {"aa": True}]}
