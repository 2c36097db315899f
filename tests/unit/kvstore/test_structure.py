"""Structures as grammars, and the reasons why some are none."""

from __future__ import annotations

import json

import pytest

from kvstore.structure import MOST_WORDS, UNFORCED, WHITESPACE, StructureRefused, grammar_of, refusal, said
from octavo.v1.inference_pb2 import Structure


def test_a_schema_is_taken_as_it_is_with_white_space_that_ends() -> None:
    space = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    given = Structure(json_schema='{"type": "array", "é": [1.5, null]}')
    assert schema_in(grammar_of(given)) == space | {"type": "array", "é": [1.5, None]}
    own = {"x-guidance": {"coerce_one_of": True}}
    assert schema_in(grammar_of(Structure(json_schema=json.dumps(own)))) == own
    assert schema_in(grammar_of(Structure(json_object=True))) == space | {"type": "object"}


def schema_in(grammar: str) -> object:
    head, _, schema = grammar.partition("start: %json ")
    assert head == UNFORCED
    return json.loads(schema)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON: Expecting property name"),
        ("{} {}", "no JSON: Extra data"),
        ("[]", "must be a JSON object"),
        ("true", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('"}]}"', "must be a JSON object"),
        ('{"maximum": NaN}', "no JSON: Out of range float values"),
        ('{"maximum": 1e999}', "no JSON: Out of range float values"),
        ('{"maximum": ' + "1" * 5000 + "}", "no JSON: "),
        ('{"a":' * 30_000 + "1" + "}" * 30_000, "no JSON: maximum recursion depth"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, reason: str) -> None:
    with pytest.raises(StructureRefused, match=f"^{reason}"):
        grammar_of(Structure(json_schema=text))
    assert refusal(Structure(json_schema=text)).startswith(reason)


@pytest.mark.parametrize(
    "structure",
    [
        Structure(json_object=True),
        Structure(json_schema="{}"),
        Structure(json_schema='{"anyOf": [{"type": "string"}, {"type": ["integer", "null"]}]}'),
        Structure(
            json_schema='{"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}'
        ),
        Structure(regex="(yes|no)( [a-z]{1,20}){0,3}"),
        Structure(regex="a/b\nc\x00\\d"),
    ],
    ids=str,
)
def test_what_can_be_compiled_is_not_refused(structure: Structure) -> None:
    assert refusal(structure) == ""


def test_reasons_are_one_line_and_not_endless() -> None:
    assert said("a\n  b\tc ") == "a b c"
    assert said("x" * 1000) == "x" * MOST_WORDS + "..."


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (Structure(json_schema='{"type": "nope"}'), "Invalid type: nope"),
        (Structure(regex="a("), 'invalid regex "a(" (in regex): regex parse error: a( ^ error: unclosed group'),
    ],
    ids=["schema", "regex"],
)
def test_reasons_are_the_librarys_without_places_in_our_grammar(structure: Structure, reason: str) -> None:
    assert refusal(structure) == reason
