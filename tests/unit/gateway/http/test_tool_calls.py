"""Calls of tools, read out of a text that comes in pieces of any size."""

from __future__ import annotations

import pytest

from gateway.http.tool_calls import CallReader, ToolCall

F = ToolCall("f", '{"a": 1}')
G = ToolCall("g", "{}")


def read(text: str, size: int) -> list[str | ToolCall]:
    """Neighbouring texts joined."""
    reader = CallReader()
    found = [each for at in range(0, len(text), size) for each in reader.read(text[at : at + size])] + reader.end()
    joined: list[str | ToolCall] = []
    for each in found:
        if isinstance(each, str) and joined and isinstance(joined[-1], str):
            joined[-1] += each
        else:
            joined.append(each)
    return joined


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" hello  world \n", [" hello  world \n"]),
        ("", []),
        ("  ", ["  "]),
        ("a <tool", ["a <tool"]),
        ("a <tool>b", ["a <tool>b"]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [F]),
        ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>\n<tool_call>{"name":"g"}</tool_call>\n', [F, G]),
        ('Sure.\n\n<tool_call>{"name":"f","parameters":{"a":1}}</tool_call>', ["Sure.", F]),
        ('a\n<tool_call>{"name":"g"}</tool_call>\nb ', ["a", G, "\nb"]),
        # What is cut off but whole counts; the rest is text, as it is.
        ('<tool_call>{"name": "g"}', [G]),
        ('a\n\n<tool_call>{"name": "g"', ['a\n\n<tool_call>{"name": "g"']),
        ("a\n<tool_call>no JSON</tool_call> b", ["a\n<tool_call>no JSON</tool_call> b"]),
        ('<tool_call>["f"]</tool_call>', ['<tool_call>["f"]</tool_call>']),
        ('<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
        (
            '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
            ['<tool_call>{"name": "f", "arguments": 1}</tool_call>'],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F]),
        ("<tool_call>" + "[" * 10_000 + "</tool_call>", ["<tool_call>" + "[" * 10_000 + "</tool_call>"]),
    ],
)
def test_texts_and_calls(text: str, found: list[str | ToolCall], size: int) -> None:
    assert read(text, size) == found


@pytest.mark.parametrize(
    "call",
    [
        *('{"name": "f", "arguments": "x"}', '{"name": "f", "arguments": "[1]"}'),
        *('{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": "{\\"a\\": Infinity}"}'),
        *('{"name": "f", "arguments": {"a": "\\ud83d"}}', '{"name": "\\ud83d"}'),  # half a character
    ],
)
def test_a_call_that_no_client_could_read_or_send_back_is_text(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert read(text, 1000) == [text]


def test_what_is_certain_goes_out_at_once() -> None:
    reader = CallReader()
    assert reader.read("Hello ") == ["Hello"]
    assert reader.read("you <to") == [" you"]
    assert reader.read('ol_call>{"name": "g"}</tool_call') == []
    assert reader.read(">") == [G]
    assert reader.end() == []
