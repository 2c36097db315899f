"""Which tools a model may call, and what keeps it to calling one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gateway.errors import AdmissionError, shown
from gateway.http.fields import json_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.http.fields import ChatFields
    from octavo.v1 import inference_pb2

_PLAIN: Final = (None, "none", "auto")
_VALUES: Final = ("const", "enum", "default", "examples")
"""Keywords of a schema that hold no schemas."""


def wants_tools(fields: ChatFields) -> bool:
    """Whether the model is told of tools. Raises AdmissionError for a choice that can't be."""
    choice = fields.tool_choice
    if choice is not None and choice != "none" and not fields.tools:
        raise AdmissionError("tool_choice", _told(choice), "needs tools")
    return bool(fields.tools) and choice != "none"


def must_call(fields: ChatFields) -> list[int]:
    """Which tools, by number, one must be called of; empty: none must be. Raises AdmissionError."""
    choice = fields.tool_choice
    if choice in _PLAIN:
        return []
    tools = fields.tools or []
    if choice == "required":
        return list(range(len(tools)))
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise AdmissionError("tool_choice", _told(choice), "must be none, auto, required, or a function with its name")
    numbers = [number for number, tool in enumerate(tools) if tool.function.name == name]
    if not numbers:
        raise AdmissionError("tool_choice.function.name", shown(name), "must be that of one of the tools")
    return numbers[:1]


def put_call(
    request: inference_pb2.GenerateRequest, tools: Sequence[Mapping[str, Any]], numbers: Sequence[int]
) -> None:
    """Keeps an answer to a call of one of the tools with these numbers. Raises AdmissionError."""
    if request.HasField("structure"):
        raise AdmissionError("tool_choice", "set", "an answer has one form; leave the other one out")
    calls = [_call(tools[number], number, f"/anyOf/{place}") for place, number in enumerate(numbers)]
    request.structure.json_schema = json_text({"anyOf": calls}, "tools")


def _call(tool: Mapping[str, Any], number: int, place: str) -> dict[str, Any]:
    """The schema of a call of a tool, as models write it; `place`: where it stands in the whole."""
    function = tool["function"]
    given = function.get("parameters")
    if not isinstance(given, dict | None):
        raise AdmissionError(f"tools[{number}].function.parameters", type(given).__name__, "must be a JSON schema")
    arguments = {"type": "object", "additionalProperties": False} if given is None else _moved(given, place)
    arguments.setdefault("type", "object")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The same, where what it says of itself is found at the place that it has now."""
    root = f"#{place}/properties/arguments"

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            name: root + each[1:]
            if name == "$ref" and isinstance(each, str) and each.startswith("#")
            else each
            if name in _VALUES
            else moved(each)
            for name, each in value.items()
        }

    found: dict[str, Any] = moved(schema)
    return found


def _told(choice: Any) -> str:
    return shown(choice) if isinstance(choice, str) else "set"
