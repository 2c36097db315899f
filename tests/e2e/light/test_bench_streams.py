"""`octavo bench streams` on a small fleet without weights: every stream whole, every troublemaker answered."""

from __future__ import annotations

import json

from bench.streams_trouble import EXPECTED
from tests.e2e.harness import octavo


def test_streams_are_measured_and_not_touched() -> None:
    ran = octavo(
        *("bench", "streams", "--streams", "12", "--workers", "1", "--json"),
        *("--tokens", "40", "--step-ms", "50", "--pause-ms", "1"),
    )
    results = json.loads(ran.stdout)
    assert list(results["loads"]) == ["grpc, alone", "grpc, beside trouble", "http, alone", "http, beside trouble"]
    for name, load in results["loads"].items():
        assert load["streams"] == 12
        assert load["tokens"] > 12
        # A commit's time is that of the millisecond in which it began.
        assert 0 <= load["added_s"]["p50"] <= load["added_s"]["p99"] <= load["added_s"]["max"] < 5
        assert load["gateway_cpu_s_per_token"] > 0
        if "trouble" in name:
            assert set(load["trouble"]) == set(EXPECTED)
            assert {kind: set(answers) for kind, answers in load["trouble"].items()} == {
                kind: {answer} for kind, answer in EXPECTED.items()
            }
