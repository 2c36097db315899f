"""What form an answer is to have, in OpenAI's words and in vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.errors import AdmissionError
from gateway.http.fields import json_text, whole_text

if TYPE_CHECKING:
    from gateway.http.fields import Common, ResponseFormat
    from octavo.v1 import inference_pb2


def put_structure(request: inference_pb2.GenerateRequest, fields: Common, wanted: ResponseFormat | None) -> None:
    """Asks for the form that the fields describe, if any. Raises AdmissionError for several, and for what can't be."""
    found = [*_of_format(wanted), *_of_vllm(fields)]
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise AdmissionError(names, "set", "an answer has one form; leave all but one out")
    for name, kind, value in found:
        setattr(request.structure, kind, whole_text(value, name) if isinstance(value, str) else value)


def _of_format(wanted: ResponseFormat | None) -> list[tuple[str, str, Any]]:
    """The field, and the form in the protocol's words: its kind and what says it."""
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", "json_object", True)]
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
    if schema is None:
        raise AdmissionError("response_format.json_schema.schema", "not set", "must be a JSON schema")
    return [("response_format", "json_schema", json_text(schema, "response_format.json_schema.schema"))]


def _of_vllm(fields: Common) -> list[tuple[str, str, Any]]:
    wanted = fields.structured_outputs
    for name in ("choice", "grammar", "structural_tag"):
        if wanted is not None and getattr(wanted, name) is not None:
            raise AdmissionError(f"structured_outputs.{name}", "set", "is not taken here; use json or regex")
    named: list[tuple[str, str, Any]] = [
        ("guided_json", "json_schema", _schema(fields.guided_json, "guided_json")),
        ("guided_regex", "regex", fields.guided_regex),
    ]
    if wanted is not None:
        named += [
            ("structured_outputs.json", "json_schema", _schema(wanted.json_schema, "structured_outputs.json")),
            ("structured_outputs.regex", "regex", wanted.regex),
            ("structured_outputs.json_object", "json_object", wanted.json_object or None),
        ]
    return [each for each in named if each[2] is not None]


def _schema(value: dict[str, Any] | str | None, field: str) -> str | None:
    return json_text(value, field) if isinstance(value, dict) else value
