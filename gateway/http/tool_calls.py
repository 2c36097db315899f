"""Calls of tools in a model's text, as Hermes and Qwen write them::

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Pure. Text comes in pieces; what surely is no call goes out at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
OTHER_WAYS: Final = ("<function=", "<arg_key>")
"""What templates say whose models write calls between the same marks, but not in JSON."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: which function, and with what (a JSON object, as text)."""

    name: str
    arguments: str


class CallReader:
    """Takes the calls out of one answer's text. ``read`` pieces of it, then ``end``; nothing of the text is lost: what
    is no call is text, marks and all."""

    def __init__(self, *, alone: bool = False) -> None:
        """``alone``: the text is a call without marks."""
        self._alone = alone
        self._held = ""
        self._gap = ""
        """White space that is layout if a call follows, and text if text does."""
        self._called = False

    def read(self, text: str) -> list[str | ToolCall]:
        """Texts and calls in their order, as far as they are certain."""
        self._held += text
        return [] if self._alone else list(self._certain())

    def end(self) -> list[str | ToolCall]:
        """What is left. A call that was cut off before its closing mark counts, if it is whole."""
        found = [] if self._alone else list(self._certain())
        rest, self._held = self._held, ""
        if self._alone and (call := call_of(rest)) is not None:
            return [call]
        call = call_of(rest.removeprefix(OPENING)) if rest.startswith(OPENING) else None
        found += self._call(call) if call else self._text(rest)
        if self._gap and not self._called:
            found.append(self._gap)
        return found

    def _certain(self) -> Iterator[str | ToolCall]:
        while self._held:
            if not self._held.startswith(OPENING):
                size = self._held.find(OPENING)
                certain = size if size >= 0 else len(self._held) - _begun(self._held)
                text, self._held = self._held[:certain], self._held[certain:]
                yield from self._text(text)
                if size < 0:
                    return
            body, closing, rest = self._held.removeprefix(OPENING).partition(CLOSING)
            if not closing:
                return
            self._held = rest
            call = call_of(body)
            yield from self._call(call) if call else self._text(f"{OPENING}{body}{CLOSING}")

    def _call(self, call: ToolCall) -> Iterator[str | ToolCall]:
        self._gap, self._called = "", True
        yield call

    def _text(self, text: str) -> Iterator[str | ToolCall]:
        text = self._gap + text
        said = text.rstrip()
        self._gap = text[len(said) :]
        if said:
            yield said


def call_of(body: str) -> ToolCall | None:
    """The call that stands between the marks; None: it is none, or one that no client could read or send back."""
    try:
        value = _object(body)
        name = value.get("name")
        # Llama's word for the same thing, which models of several trainings mix up.
        given = value.get("arguments", value.get("parameters", {}))
        # By way of the object: text in JSON of its own may be no object, or have what no text has.
        arguments = json.dumps(_object(given) if isinstance(given, str) else given, ensure_ascii=False)
        if not isinstance(name, str) or not arguments.startswith("{"):
            return None
        (name + arguments).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, arguments)


def _object(text: str) -> dict[str, Any]:
    """Raises ValueError and RecursionError for what is no JSON object."""
    value = json.loads(text, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _begun(text: str) -> int:
    """Characters at the text's end that an opening mark may begin with."""
    longest = min(len(text), len(OPENING) - 1)
    return next((size for size in range(longest, 0, -1) if OPENING.startswith(text[-size:])), 0)
