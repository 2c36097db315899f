"""Beginnings of prompts as lines of a batch."""

from __future__ import annotations

import json

import pytest

from gateway.batch.lines import FileError, checked
from gateway.batch.warm import warming


def test_each_becomes_a_line_with_one_token() -> None:
    given = [
        b'"You are a geographer."\n',
        b"\n",
        b'{"prompt": "A book", "model": "m"}',
        b'{"id": "x", "token_ids": [5]}',
    ]
    made = [json.loads(each) for each in warming(given)]
    one = {"max_tokens": 1, "temperature": 0}
    messages = [{"role": "system", "content": "You are a geographer."}, {"role": "user", "content": "."}]
    assert made == [
        {"id": "warm-1", "messages": messages, **one},
        {"id": "warm-3", "prompt": "A book", "model": "m", **one},
        {"id": "warm-4", "token_ids": [5], **one},
    ]
    assert len(list(checked(warming(given)))) == 3


@pytest.mark.parametrize("line", [b"x", b"5", b"{}", b'{"system": "a", "prompt": "b"}'])
def test_what_is_no_beginning(line: bytes) -> None:
    with pytest.raises(FileError, match=r"^line 2: "):
        list(warming([b'"a"', line]))
