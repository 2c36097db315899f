"""Beginnings of prompts as a batch: each is computed once, for the blocks that it leaves in a worker's cache. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gateway.batch.lines import FileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_INPUTS = ("prompt", "messages", "token_ids")


def warming(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a batch, in the short form. Each given line is JSON: a system message as text, or an object with one of
    system, prompt, messages and token_ids, and perhaps model and cache_salt. Raises FileError."""
    for number, raw in enumerate(lines, 1):
        if raw.strip():
            yield json.dumps(
                {"id": f"warm-{number}", **_asked(number, raw), "max_tokens": 1, "temperature": 0}
            ).encode()


def _asked(number: int, raw: bytes) -> dict[str, Any]:
    try:
        told = json.loads(raw)
    except ValueError as error:
        raise FileError(f"line {number}: is no JSON: {error}") from None
    if isinstance(told, str):
        told = {"system": told}
    if not isinstance(told, dict) or len({"system", *_INPUTS} & set(told)) != 1:
        raise FileError(f"line {number}: must be text, or have one of system, {', '.join(_INPUTS)}")
    if "system" in told:
        # What a template puts before the user's words is what requests will have in common.
        told["messages"] = [{"role": "system", "content": told.pop("system")}, {"role": "user", "content": "."}]
    return {name: value for name, value in told.items() if name != "id"}
