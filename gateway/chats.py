"""Chats as templates take them. Pure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gateway.errors import AdmissionError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.v1 import inference_pb2

T = TypeVar("T")

MAX_LEVELS: Final = 128
"""Of a tool or of arguments. Whoever goes through them takes a part of Python's stack for each."""
_HALF: Final = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can write and no prompt can have."""


def messages_of(chat: inference_pb2.Chat) -> list[dict[str, Any]]:
    """The messages: each with `role` and `content`, and of the rest what is set. Raises AdmissionError for arguments
    that are no JSON object."""
    return [_message(message, index) for index, message in enumerate(chat.messages)]


def tools_of(chat: inference_pb2.Chat) -> list[dict[str, Any]]:
    """The tools. Raises AdmissionError for one that is no JSON object."""
    return [_object(text, f"chat.tools[{index}]") for index, text in enumerate(chat.tools)]


def masked(value: T, mask: Callable[[str], str]) -> T:
    """A JSON value whose texts, keys included, went through `mask`."""
    return _masked(value, mask)  # type: ignore[no-any-return]


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {mask(key): _masked(each, mask) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each, mask) for each in value]
    return value


def _message(message: inference_pb2.ChatMessage, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _object(call.arguments, f"chat.messages[{index}].tool_calls[{place}].arguments"),
                },
            }
            for place, call in enumerate(message.tool_calls)
        ]
    found |= {name: value for name in ("tool_call_id", "name") if (value := getattr(message, name))}
    return found


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not _fits(value, MAX_LEVELS):
        limit = f"must be a JSON object of valid Unicode, at most {MAX_LEVELS} levels deep"
        raise AdmissionError(field, shown(text), limit)
    return value


def _fits(value: Any, levels: int) -> bool:
    """Whether a value has no more levels, and whole characters alone."""
    if isinstance(value, dict):
        return levels > 0 and all(_fits(key, 0) and _fits(each, levels - 1) for key, each in value.items())
    if isinstance(value, list):
        return levels > 0 and all(_fits(each, levels - 1) for each in value)
    return not isinstance(value, str) or _HALF.search(value) is None
