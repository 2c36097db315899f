"""What is told of rounds with a broker that writes down more or less."""

from __future__ import annotations

from bench.chaos.durability import COLUMNS, Round, cells, summarise
from bench.stats import Level, Sample
from bench.stats import summarise as level_of


def a_round(mode: str, tokens: int, file_bytes: int, error: str = "") -> Round:
    """Of one second."""
    samples = [Sample(output_tokens=tokens, first_token_s=tokens / 1000, seconds_per_token=0.01, total_s=1.0)]
    failed = [Sample(error=error)] if error else []
    level: Level = level_of(2, [*samples, *failed], 1.0)
    return Round(mode, level, file_bytes)


def test_a_row_for_each_mode_with_the_medians_of_its_rounds() -> None:
    rounds = [a_round("no", 100, 0), a_round("always", 50, 500), a_round("no", 300, 0), a_round("always", 70, 700)]
    none, always = summarise([*rounds, a_round("no", 200, 0), a_round("always", 80, 800, "UNAVAILABLE: x")])
    assert (none["mode"], none["output_tokens_per_s"], none["of_none"], none["bytes_per_token"]) == ("no", 200, 1.0, 0)
    assert (always["output_tokens_per_s"], always["of_none"], always["errors"]) == (70, 0.35, 1)
    assert always["first_token_s"] == {"p50": 0.07, "p90": 0.07, "p99": 0.07}
    assert always["bytes_per_token"] == 10
    assert cells(always) == ("always", "70.0", "0.350", *["70.0 ms"] * 3, *["10.0 ms"] * 2, "10", "1")
    assert len(cells(none)) == len(COLUMNS)


def test_without_answers_and_without_a_round_that_writes_nothing() -> None:
    (row,) = summarise([Round("always", level_of(2, [Sample(error="x")], 1.0), 9)])
    assert (row["of_none"], row["first_token_s"], row["bytes_per_token"]) == (None, None, None)
    assert cells(row) == ("always", "0.0", *["-"] * 7, "1")
