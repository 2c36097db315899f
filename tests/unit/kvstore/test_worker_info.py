"""How a lease and a load are written and read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import MalformedValue
from kvstore.worker_info import Load, WorkerInfo, lease_fields, parse_lease, parse_load

INFO = WorkerInfo(
    id="w0",
    incarnation="i",
    model="m",
    fingerprint="f",
    context_length=8192,
    prefill_tok_s=1 / 3,
    step_ms=1e-05,
    sequence_ms=0.0,
    fetch_tok_s=1e20,
    index="degraded",
)


def stored(info: WorkerInfo) -> dict[bytes, bytes]:
    """As the server has it: the client writes numbers by `repr`."""
    said = lease_fields(info)
    pairs = zip(said[::2], said[1::2], strict=True)
    values = {name: value if isinstance(value, str) else repr(value) for name, value in pairs}
    return {name.encode(): value.encode() for name, value in values.items()} | {b"incarnation": b"i"}


def test_a_lease_is_read_as_it_was_written() -> None:
    assert parse_lease(b"w0", stored(INFO), 7, 9) == replace(INFO, heartbeat_age_ms=7, heartbeat_ms=9)
    # What the script writes, or says by the key, is not written twice.
    assert not {b"id", b"heartbeat_age_ms", b"heartbeat_ms"} & stored(INFO).keys()


def test_a_worker_of_another_version_has_not_measured_what_it_does_not_know() -> None:
    new = {b"prefill_tok_s", b"step_ms", b"sequence_ms", b"fetch_tok_s", b"index"}
    lease = {name: value for name, value in stored(INFO).items() if name not in new} | {b"later": b"1"}
    found = parse_lease(b"w0", lease, 0)
    assert (found.prefill_tok_s, found.step_ms, found.sequence_ms, found.fetch_tok_s) == (0.0, 0.0, 0.0, 0.0)
    assert (found.index, found.context_length) == ("", 8192)


@pytest.mark.parametrize("rate", [b"nan", b"inf", b"-0.5", b"", b"fast", b"\xff"])
def test_what_is_no_rate_is_no_lease(rate: bytes) -> None:
    with pytest.raises(MalformedValue, match="does not parse"):
        parse_lease(b"w0", stored(INFO) | {b"step_ms": rate}, 0)


def test_a_load_is_what_is_a_number() -> None:
    assert parse_load([b"1", b"20", b"300", b"4"]) == Load(1, 20, 300, 4)
    assert parse_load([None, None, None, None]) == Load()
    assert parse_load([b"-1", b"1.5", b"x", b""]) == Load()
    assert parse_load([b"9" * 15, b"9" * 16, b"9" * 5000, b"1"]) == Load(10**15 - 1, 0, 0, 1)
