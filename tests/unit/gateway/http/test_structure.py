"""What form an answer is to have."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import AdmissionError
from gateway.http.translate import chat_completion, completion

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "response_format",
        ),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
    ],
)
def test_answers_of_a_given_form_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        chat_completion({**HI, **fields})
    assert str(caught.value) == f"{name} is set: answers of a given form are not served; leave it out"


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}, {"guided_regex": None}],
)
def test_text_has_no_form(fields: dict[str, Any]) -> None:
    chat_completion({**HI, **fields})


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
    ],
)
def test_forms_that_can_not_be(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        completion({"prompt": "a", **fields})
    assert str(caught.value) == told


def test_a_schema_must_be_there() -> None:
    with pytest.raises(AdmissionError) as caught:
        chat_completion({**HI, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}})
    assert str(caught.value) == "response_format.json_schema.schema is not set: must be a JSON schema"
