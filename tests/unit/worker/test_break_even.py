"""When fetching pages pays, and when a store is left alone."""

from __future__ import annotations

import pytest

from worker.break_even import ASK_S, PROBE_S, PROBE_TOKENS, BreakEven
from worker.circuit import FIRST_S, LONGEST_S, Circuit


def measured(latency_s: float = 0.01, tokens_per_s: float = 10_000) -> BreakEven:
    made = BreakEven()
    made.asked(latency_s, 0.0)
    made.fetched(1000, 1000 / tokens_per_s)
    return made


def test_what_is_not_known_yet_is_tried() -> None:
    made = BreakEven()
    assert made.fetch_tok_s == 0
    assert made.worth_a_look(16, 1e9, 0.0)
    assert made.most(5000, 1e9, 0.0) == 5000


def test_the_line_is_where_both_take_as_long() -> None:
    made = measured()
    # 0.01 s and 0.1 ms a token, against 1 ms a token: 11.1 tokens.
    assert made.tokens(1000) == pytest.approx(0.01 / 0.0009)
    assert [made.pays(tokens, 1000) for tokens in (11, 12)] == [False, True]
    assert made.fetch_tok_s == pytest.approx(10_000)
    assert made.most(12, 1000, 0.0) == 12
    assert "10000 tokens a second are fetched after 10.0 ms, 1000 computed: fetching pays from 11" in made.described(
        1000
    )


def test_where_it_never_pays_a_few_tokens_are_fetched_now_and_then() -> None:
    made = measured(tokens_per_s=500)
    assert made.tokens(1000) == float("inf")
    assert "never pays" in made.described(1000)
    assert made.worth_a_look(9999, 1000, 5.0)
    assert made.most(9999, 1000, 5.0) == PROBE_TOKENS
    for later in (5.0, 5.0 + PROBE_S - 0.1):
        assert not made.worth_a_look(9999, 1000, later)
        assert made.most(9999, 1000, later) == 0
    assert made.most(100, 1000, 5.0 + PROBE_S) == 100
    # The store has become fast.
    for _ in range(30):
        made.fetched(256, 256 / 20_000)
    assert made.most(9999, 1000, 5.0 + PROBE_S) == 9999


def test_the_last_fetches_count_most_and_nothing_makes_no_sense() -> None:
    made = measured()
    made.fetched(0, 1.0)
    made.fetched(10, 0.0)
    made.fetched(10, -1.0)
    assert made.fetch_tok_s == pytest.approx(10_000)
    made.fetched(1000, 0.3)
    assert made.fetch_tok_s == pytest.approx(1 / (0.0001 + 0.2 * 0.0002))
    made.asked(0.06, 0.0)
    assert made.latency_s == pytest.approx(0.02)


def test_latency_counts_before_anything_was_fetched() -> None:
    made = BreakEven()
    made.asked(0.5, 0.0)
    assert made.most(501, 1000, 0.0) == 501
    assert made.worth_a_look(500, 1000, 0.0), "to find out"
    assert made.most(500, 1000, 0.0) == PROBE_TOKENS
    assert not made.worth_a_look(500, 1000, 1.0)
    assert made.most(500, 1000, 1.0) == 0


def test_one_outlier_does_not_make_a_store_slow() -> None:
    made = measured()
    made.fetched(16, 2.0)
    assert made.pays(16 * 16, 1000)
    assert made.fetch_tok_s > 9_000
    # But a store that has become slow is known to be.
    for _ in range(12):
        made.fetched(1000, 2.0)
    assert not made.pays(100_000, 1000)


def test_a_first_fetch_that_was_an_outlier_is_outweighed_by_one_probe() -> None:
    made = BreakEven()
    made.asked(0.001, 0.0)
    made.fetched(16, 2.0)
    assert not made.pays(1000, 100)
    assert made.most(1000, 100, 0.0) == PROBE_TOKENS
    made.fetched(PROBE_TOKENS, 0.025)
    assert made.pays(1000, 100)


def test_a_probe_that_was_quick_counts_more() -> None:
    made = measured(tokens_per_s=500)
    made.fetched(PROBE_TOKENS, PROBE_TOKENS / 20_000)
    assert made.fetch_tok_s == pytest.approx(1 / (0.5 * 0.002 + 0.5 * 0.00005))
    made.asked(0.002, 0.0)
    assert made.latency_s == pytest.approx(0.006)


def test_no_answer_in_time_is_a_slow_one_and_the_next_question_waits_for_its_turn() -> None:
    made = BreakEven()
    made.late(0.1, 5.0)
    assert made.latency_s == pytest.approx(0.4)
    assert not made.worth_a_look(399, 1000, 5.0)
    assert made.worth_a_look(401, 1000, 5.0)
    assert not made.worth_a_look(399, 1000, 5.0 + ASK_S - 0.1)
    assert made.worth_a_look(399, 1000, 5.0 + ASK_S)
    assert made.most(399, 1000, 5.0 + ASK_S) == 0, "not before it is answered"
    made.late(0.01, 6.0)
    assert made.latency_s == pytest.approx(0.4), "it tells nothing new"
    made.asked(0.001, 6.0 + ASK_S)
    assert made.most(399, 1000, 6.0 + ASK_S) == 399


def test_nobody_asks_where_fetching_itself_is_too_slow() -> None:
    made = measured(tokens_per_s=500)
    assert made.most(9999, 1000, 0.0) == PROBE_TOKENS
    assert not made.worth_a_look(9999, 1000, ASK_S + 1)


def test_a_circuit_lets_one_try_after_a_pause_that_grows() -> None:
    circuit = Circuit()
    now = 100.0
    assert circuit.allows(now)
    pause = FIRST_S
    for _ in range(8):
        circuit.failed(now)
        circuit.failed(now)  # another one that was under way
        assert circuit.wait_s(now) == pause
        assert not circuit.allows(now + pause - 0.01)
        now += pause
        assert circuit.allows(now)
        assert not circuit.allows(now), "two tries at once"
        pause = min(2 * pause, LONGEST_S)
    assert pause == LONGEST_S
    circuit.worked()
    assert circuit.allows(now)
    assert circuit.allows(now)
    assert circuit.wait_s(now) == 0
    circuit.failed(now)
    assert circuit.wait_s(now) == FIRST_S


def test_a_try_that_never_tells_does_not_close_the_way_for_ever() -> None:
    circuit = Circuit()
    circuit.failed(0.0)
    assert circuit.allows(FIRST_S)
    assert not circuit.allows(FIRST_S + 0.1)
    assert circuit.allows(2 * FIRST_S)
