"""From samples to what is told of policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.routing_figures import (
    FAILED,
    REFUSED,
    UNANSWERED,
    Sample,
    Window,
    shown_first_token,
    summarise,
)
from bench.routing_verdicts import nothing_answered, told_aims, told_lag, told_unanswered, versus
from tests.unit.bench import routing_made

WINDOW = Window(10.0, 20.0)
GOOD = replace(routing_made.GOOD, due_s=12.0, lag_s=0.5, first_token_s=1.0, tokens=((1.0, 1), (1.5, 2), (2.0, 1)))
NONE = Sample(due_s=13.0, lag_s=0.0, prompt_tokens=50, outcome=REFUSED, waited_s=0.1)


def test_what_is_due_in_the_window_counts() -> None:
    early, late = replace(GOOD, due_s=9.9, lag_s=0.0), replace(GOOD, due_s=20.0, lag_s=0.0)
    figures = summarise([early, GOOD, replace(GOOD, due_s=10.0, worker="w1", first_token_s=3.0), late], WINDOW)
    assert (figures.requests, figures.answered, figures.workers, figures.busiest) == (2, 2, 2, 0.5)
    assert figures.first_token_s is not None
    assert (figures.first_token_s.p50, figures.first_token_s.max) == (2.0, 3.0)
    assert figures.lag_s is not None
    assert figures.lag_s.max == 0.5


def test_rates_are_of_what_came_in_the_window() -> None:
    """Of one that was sent at 18.5: its first token at 19.5, two more at 20.0, which is too late."""
    figures = summarise([replace(GOOD, due_s=18.0)], WINDOW)
    assert figures.prompt_tokens_per_s == 10.0
    assert figures.output_tokens_per_s == 0.1
    assert figures.tokens_per_s == 10.1
    assert figures.answers_per_s == 0.0
    # Sent before the window, at 8.5: its prompt was done at 9.5, its later tokens count, and so does its end.
    figures = summarise([replace(GOOD, due_s=8.0)], WINDOW)
    assert (figures.prompt_tokens_per_s, figures.output_tokens_per_s, figures.answers_per_s) == (0.0, 0.3, 0.1)
    assert (figures.requests, figures.first_token_s, figures.hit_rate) == (0, None, None)


def test_outcomes_are_told_apart() -> None:
    broken = replace(NONE, outcome=FAILED, error="UNAVAILABLE: gone")
    figures = summarise([GOOD, NONE, NONE, broken, replace(NONE, outcome=UNANSWERED)], WINDOW)
    assert (figures.requests, figures.answered, figures.refused, figures.unanswered) == (5, 1, 2, 1)
    assert figures.errors == {"UNAVAILABLE: gone": 1}
    assert figures.hit_rate == 0.64


def test_who_was_given_up_counts_with_the_time_it_waited() -> None:
    given_up = replace(NONE, outcome=UNANSWERED, waited_s=9.0)
    begun = replace(GOOD, outcome=UNANSWERED, waited_s=9.0)
    figures = summarise([GOOD, given_up, begun, NONE, replace(NONE, outcome=FAILED, error="x")], WINDOW)
    assert figures.first_token_s is not None
    assert (figures.first_token_s.p50, figures.first_token_s.max) == (1.0, 9.0)


@pytest.mark.parametrize(
    ("waited", "at_least"),
    [
        (9.0, ("mean", "p99", "max")),
        (0.5, ("mean", "p50", "p90", "p99", "max")),
        (10.5, ("mean", "p90", "p99", "max")),
    ],
)
def test_what_lies_among_those_who_were_given_up_is_marked(waited: float, at_least: tuple[str, ...]) -> None:
    """Of 21 in order the p90 is the 19th: with 20 answers and one given up it is an answer's, with three it is not."""
    given_up = [replace(NONE, outcome=UNANSWERED, waited_s=waited)] * (3 if waited > 10 else 1)
    figures = summarise([GOOD] * (21 - len(given_up)) + given_up, WINDOW)
    assert figures.first_token_at_least == at_least
    run = figures.as_dict()
    assert shown_first_token(run, "max") == f"> {max(waited, 1.0):.2f} s"
    assert shown_first_token(run, "p50") == ("> 1.00 s" if waited < 1 else "1.00 s")


def test_nobody_who_got_a_first_token_is_no_figure() -> None:
    figures = summarise([replace(NONE, outcome=UNANSWERED, waited_s=9.0)] * 3, WINDOW)
    assert (figures.first_token_s, figures.first_token_at_least, figures.unanswered) == (None, (), 3)
    assert shown_first_token(figures.as_dict(), "p50") == "-"


def test_predictions_are_compared_with_what_was_found() -> None:
    less, more = replace(GOOD, predicted_tokens=48), replace(GOOD, predicted_tokens=80)
    figures = summarise([GOOD, less, more, more, NONE], WINDOW)
    assert (figures.predicted_equal, figures.predicted_less, figures.predicted_more) == (0.25, 0.25, 0.5)


def test_time_between_tokens() -> None:
    assert GOOD.seconds_per_token == pytest.approx(1 / 3)
    assert replace(GOOD, tokens=((1.0, 1),)).seconds_per_token is None


def test_nothing_at_all() -> None:
    figures = summarise([], WINDOW)
    assert (figures.requests, figures.hit_rate, figures.busiest, figures.lag_s) == (0, None, None, None)
    assert figures.tokens_per_s == 0.0


def run(
    policy: str,
    p90: float | None,
    tokens: float,
    scenario: str = "ratio 2",
    load: float = 3.0,
    *,
    answered: int = 10,
    at_least: tuple[str, ...] = (),
) -> dict[str, Any]:
    return {
        "policy": policy,
        "scenario": scenario,
        "load": load,
        "requests": 10,
        "answered": answered,
        "unanswered": 10 - answered,
        "first_token_at_least": at_least,
        "first_token_s": None if p90 is None else {"p90": p90},
        "tokens_per_s": tokens,
        "lag_s": {"p99": p90 / 1000 if p90 else 0.0, "max": 0.02},
        "client_cpu": tokens / 1000,
    }


RUNS = [
    run("least-loaded", 8.0, 100.0, answered=7),
    run("prefix", 2.0, 180.0),
    run("random", 9.0, 90.0),
    run("prefix", 1.1, 96.0, "hit-free", 0.8),
    run("least-loaded", 1.0, 120.0, "hit-free", 0.8),
    run("prefix", 0.5, 99.0, "ratio 4", answered=9),
    run("least-loaded", 1.0, 100.0, "ratio 4"),
    run("prefix", 1.0, 100.0, "hot prefix"),
]


def test_prefix_against_least_loaded_where_both_were_run() -> None:
    assert [tuple(each.values()) for each in versus(RUNS)] == [
        ("ratio 2", 3.0, 0.25, "", 1.8, False),
        ("hit-free", 0.8, 1.1, "", 0.8, True),
        ("ratio 4", 3.0, 0.5, "", 0.99, False),
    ]


def test_the_aims_are_told_with_their_figures() -> None:
    """Throughput counts where not all was answered: else it is that of the load."""
    assert told_aims(versus(RUNS)) == [
        "Where the working set is 2 pools, at load 3: TTFT p90 is 0.25 of least-loaded's (the aim is at most 0.33), "
        "throughput 1.80 (at least 1.5).",
        "Against least-loaded, TTFT p90 is at worst 1.10 (hit-free, load 0.8; the aim is at most 1.05).",
        "Where not all was answered, throughput is at worst 0.99 of least-loaded's (ratio 4, load 3; the aim is at "
        "least 0.95).",
    ]
    kept_up = versus([run("prefix", 1.0, 100.0), run("least-loaded", 2.0, 100.0)])
    assert told_aims(kept_up) == [
        "Where the working set is 2 pools, at load 3: TTFT p90 is 0.50 of least-loaded's (the aim is at most 0.33), "
        "throughput 1.00 (at least 1.5; both answered all that came).",
        "Against least-loaded, TTFT p90 is at worst 0.50 (ratio 2, load 3; the aim is at most 1.05).",
    ]
    assert told_aims(versus(RUNS[:1])) == []


def test_a_run_without_an_answer_has_no_ratio_and_no_verdict() -> None:
    pair = [run("prefix", None, 100.0, answered=0), run("least-loaded", 1.0, 50.0)]
    assert versus(pair) == []
    assert versus([run("prefix", 1.0, 100.0), run("least-loaded", None, 0.0, answered=0)]) == []
    assert told_aims(versus(pair)) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [((), ("p90", "p99"), "< 0.25"), (("p90",), (), "> 0.25"), (("p99",), ("p99",), "0.25"), (("p90",), ("p90",), "-")],
)
def test_a_ratio_to_what_lies_among_the_unanswered_is_marked(
    ours: tuple[str, ...], theirs: tuple[str, ...], told: str
) -> None:
    pair = [
        run("prefix", 2.0, 150.0, answered=9, at_least=ours),
        run("least-loaded", 8.0, 100.0, answered=9, at_least=theirs),
    ]
    sentences = told_aims(versus(pair))
    assert f"TTFT p90 is {told} of least-loaded's" in sentences[0]
    if told == "-":
        assert sentences[1] == "At 1 of 1 loads both p90 lie among the unanswered, and no ratio is known."
    else:
        assert sentences[1].startswith(f"Against least-loaded, TTFT p90 is at worst {told} (ratio 2")


def test_who_waited_for_nothing_is_told_what_to_raise() -> None:
    silent = [run(policy, None, 0.0, answered=0) for policy in ("prefix", "random")]
    assert nothing_answered(silent)
    assert told_unanswered(silent) == ["Nothing was answered: raise --drain or --seconds."]
    assert told_unanswered([RUNS[0], silent[1]]) == [
        "Of 1 of 2 runs nothing was answered: raise --drain or --seconds (random, ratio 2, load 3)."
    ]
    assert told_unanswered(RUNS) == []
    # All were refused: no time would help.
    assert told_unanswered([{**silent[0], "unanswered": 0}]) == []
    assert not nothing_answered(RUNS)
    assert not nothing_answered([])


def test_the_load_generators_own_lag_is_told() -> None:
    assert told_lag(RUNS) == (
        "The load generator sent at most 9.0 ms late (p99 of the worst run: random, ratio 2, load 3; its latest "
        "20.0 ms) and took at most 18% of a core."
    )
    assert told_lag([{**RUNS[0], "lag_s": None}]) == "Nothing was sent while it counted: raise --seconds."
