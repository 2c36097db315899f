"""What a call for help looks like, and what is none."""

from __future__ import annotations

import pytest

from kvstore.help import Call, parse_call


@pytest.mark.parametrize("call", [Call("w0", 1.25, 0.5), Call("host:a-b_1.c", 0.0, 0.0), Call("w", 12345.5, 1e-05)])
def test_a_call_is_read_as_it_was_written(call: Call) -> None:
    assert parse_call(call.encode().encode()) == call


@pytest.mark.parametrize(
    "payload", [b"", b"w0", b"1 2", b"1 2 ", b"-1 2 w0", b"1 nan w0", b"inf 1 w0", b"one 2 w0", b"1 2 \xff"]
)
def test_what_no_worker_has_written_is_no_call(payload: bytes) -> None:
    assert parse_call(payload) is None
