"""Exact figures from hand-made samples."""

from __future__ import annotations

import pytest

from bench.stats import Sample, Spread, percentile, spread, summarise


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 50, 1.5),
        ([0.0, 10.0], 90, 9.0),
        ([float(n) for n in range(101)], 99, 99.0),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_percentile_refuses_what_has_no_answer() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="101 is not a percentage"):
        percentile([1.0], 101)


def test_spread() -> None:
    assert spread([]) is None
    assert spread([4.0, 2.0]) == Spread(mean=3.0, p50=3.0, p90=3.8, p99=3.98, max=4.0)


def test_rates_count_good_answers_over_wall_time() -> None:
    good = [
        Sample(
            prompt_tokens=100, cached_tokens=64, output_tokens=10, first_token_s=0.5, seconds_per_token=0.1, total_s=1.4
        ),
        Sample(prompt_tokens=50, output_tokens=1, first_token_s=0.3, total_s=0.3),
    ]
    bad = [Sample(total_s=9.0, error="UNAVAILABLE: x"), Sample(total_s=9.0, error="UNAVAILABLE: x")]
    level = summarise(2, [*good, *bad], wall_s=2.0)
    assert (level.requests, level.errors) == (4, {"UNAVAILABLE: x": 2})
    assert (level.prompt_tokens, level.cached_tokens, level.output_tokens) == (150, 64, 11)
    assert (level.output_tokens_per_s, level.total_tokens_per_s) == (5.5, 80.5)
    assert level.seconds_per_token == Spread(0.1, 0.1, 0.1, 0.1, 0.1)
    assert level.first_token_s is not None
    assert (level.first_token_s.mean, level.first_token_s.max) == (0.4, 0.5)
    assert level.total_s is not None
    assert level.total_s.max == 1.4


def test_a_level_without_good_answers_has_no_spreads() -> None:
    level = summarise(1, [Sample(error="e")], wall_s=1.0)
    assert (level.output_tokens_per_s, level.first_token_s, level.total_s) == (0.0, None, None)
    assert level.as_dict()["seconds_per_token"] is None
