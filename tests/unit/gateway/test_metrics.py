"""What a gateway measures of a call. The clock is the test's."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gateway import metrics as measured
from gateway.metrics import CALL_PARTS, Call, Metrics
from kvstore.parts import Parts, Spent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(measured.time, "monotonic", lambda: clock.now)
    return clock


def test_the_parts_of_a_call_follow_on_each_other(clock: SimpleNamespace) -> None:
    metrics = Metrics()
    call = Call(metrics)
    for part, seconds in (("check", 0.25), ("tokenize", 0.5), ("send", 1.0)):
        clock.now += seconds
        call.lap(part)
    assert metrics.parts.read() == {
        "check": Spent(1, 0.25),
        "tokenize": Spent(1, 0.5),
        "send": Spent(1, 1.0),
        "relay": Spent(0, 0.0),
    }


def test_a_response_is_relayed_from_when_its_delivery_was_heard(clock: SimpleNamespace) -> None:
    metrics = Metrics()
    call = Call(metrics)
    clock.now += 2.0
    call.output(1, 101.5)
    clock.now += 1.0
    call.output(2, 102.75)
    assert metrics.parts.read()["relay"] == Spent(2, 0.75)
    assert metrics.registry.get_sample_value("octavo_time_to_first_token_seconds_sum") == 2.0
    assert metrics.registry.get_sample_value("octavo_time_per_output_token_seconds_sum") == 0.5


def test_parts_the_broker_and_the_process_are_shown() -> None:
    metrics, spent = Metrics(), Parts()
    metrics.watch_broker(spent)
    spent.add("submit", 0.5)
    shown = metrics.registry.get_sample_value
    assert shown("octavo_broker_seconds_sum", {"call": "submit"}) == 0.5
    assert [shown("octavo_part_seconds_count", {"part": part}) for part in CALL_PARTS] == [0, 0, 0, 0]
    seconds = shown("process_cpu_seconds_total")
    if sys.platform == "linux":
        assert seconds is not None
        assert seconds > 0
