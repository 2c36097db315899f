"""What form an answer is to have."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import AdmissionError
from gateway.http.bodies import parsed
from gateway.http.problems import Failed
from gateway.http.translate import chat_completion, completion
from octavo.v1.inference_pb2 import Structure

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({"response_format": {"type": "json_object"}}, Structure(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Structure(json_schema='{"type": "object"}'),
        ),
        ({"guided_regex": "a+"}, Structure(regex="a+")),
        ({"guided_json": SCHEMA}, Structure(json_schema='{"type": "object"}')),
        ({"guided_json": '{"type":"object"}'}, Structure(json_schema='{"type":"object"}')),
        ({"structured_outputs": {"regex": "a+"}}, Structure(regex="a+")),
        ({"structured_outputs": {"json": SCHEMA}}, Structure(json_schema='{"type": "object"}')),
        ({"structured_outputs": {"json_object": True}}, Structure(json_object=True)),
    ],
)
def test_forms_in_the_words_of_clients(fields: dict[str, Any], structure: Structure) -> None:
    assert chat_completion({**HI, **fields}).requests[0].structure == structure


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}, {"guided_regex": None}],
)
def test_text_has_no_form(fields: dict[str, Any]) -> None:
    assert not chat_completion({**HI, **fields}).requests[0].HasField("structure")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
            "guided_regex and structured_outputs.regex is set: an answer has one form; leave all but one out",
        ),
        (
            {"structured_outputs": {"choice": ["a"]}},
            "structured_outputs.choice is set: is not taken here; use json or regex",
        ),
        (
            {"guided_regex": "\ud800"},
            "guided_regex is text with half a character: must be valid Unicode",
        ),
    ],
)
def test_forms_that_can_not_be(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        completion({"prompt": "a", **fields})
    assert str(caught.value) == told


@pytest.mark.parametrize("name", ["response_format", "guided_json", "tools"])
def test_what_is_too_deep_to_be_read_or_written_is_refused(name: str) -> None:
    """At whatever depth the first of them gives up."""
    told = set()
    for levels in range(850, 1000):
        deep = '{"a":' * levels + "1" + "}" * levels
        field = {
            "response_format": f'{{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}',
            "guided_json": deep,
            "tools": f'[{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]',
        }[name]
        body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "{name}": {field}}}'
        try:
            chat_completion(parsed(body.encode()))
        except (AdmissionError, Failed) as refused:
            told.add(str(refused).rpartition(" is ")[2])
    assert "nested too deeply" in told
    assert told <= {"nested too deeply"}


def test_a_schema_must_be_there() -> None:
    with pytest.raises(AdmissionError) as caught:
        chat_completion({**HI, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}})
    assert str(caught.value) == "response_format.json_schema.schema is not set: must be a JSON schema"
