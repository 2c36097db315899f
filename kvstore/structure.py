"""The form of an answer, as llguidance takes it: one grammar for each structure, under limits that hold everywhere.

What a gateway has tried is what a worker compiles. The library is imported where it is used: most processes never do.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits

    from octavo.v1 import inference_pb2

WHITESPACE: Final = r"[ \t\n\r]{1,32}"
"""Between the tokens of JSON, unless the schema has an ``x-guidance`` of its own. Without a bound a small model may go
on with it for ever."""
UNFORCED: Final = '%llguidance {"no_forcing": true}\n'
"""The library would follow text that nothing can replace to its end, however long that is, to have it in the tokens
that it would be encoded to. Without, such text is the model's to cut into tokens, and no mask takes long."""
PLACES: Final = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: |\n *\d+ \|.*|<non-verbose/>", re.DOTALL)
"""What the library says of where something is in the grammar."""
MOST_WORDS: Final = 300
"""Characters of the library's reasons that are told."""


class StructureRefused(ValueError):  # noqa: N818 (says what happened)
    """No answer can be given in this form. The text says why, for the caller to read."""


def grammar_of(structure: inference_pb2.Structure) -> str:
    """What the library compiles. Raises StructureRefused for a schema that is no JSON object."""
    if structure.WhichOneof("kind") == "regex":
        from llguidance import LLMatcher

        (quoted,) = json.loads(LLMatcher.grammar_from_regex(structure.regex))["grammars"]
        return f"{UNFORCED}{quoted['lark_grammar']}"
    schema: Any = {"type": "object"}
    if not structure.json_object:
        try:
            schema = json.loads(structure.json_schema)
        except (ValueError, RecursionError) as error:
            raise StructureRefused(f"no JSON: {said(str(error))}") from error
    if not isinstance(schema, dict):
        raise StructureRefused("must be a JSON object")
    try:
        return f"{UNFORCED}start: %json {json.dumps(_options() | schema, allow_nan=False)}"
    except ValueError as error:
        raise StructureRefused(f"no JSON: {error}") from error


def limits() -> LLParserLimits:
    """Of compiling, and of each token after it. What needs more is refused, or ends the one answer that did."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=20_000,
        step_max_items=10_000,
        max_lexer_states=25_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def refusal(structure: inference_pb2.Structure) -> str:
    """Why this can't be compiled; empty where it can. May take whatever time and memory the library takes."""
    from llguidance import LLMatcher

    try:
        grammar = grammar_of(structure)
    except StructureRefused as refused:
        return str(refused)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return said(messages[0]) if failed else ""


def said(text: str) -> str:
    """A reason as callers are told it: in one line, not endless, and without places in a grammar that isn't theirs."""
    line = " ".join(PLACES.sub("", text).replace("NoExtensionBias", "nothing can follow").split())
    return line if len(line) <= MOST_WORDS else f"{line[:MOST_WORDS]}..."


def _options() -> dict[str, Any]:
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}}
