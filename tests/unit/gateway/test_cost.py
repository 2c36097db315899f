"""What a job costs on a worker, in seconds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gateway.cost import (
    AHEAD_S,
    BUSY_STEPS,
    COPIES,
    DEFAULTS,
    LEAST_SEQUENCE,
    NEAR,
    STALL,
    Candidate,
    Cost,
    Rates,
    Work,
    cached,
    cost,
    costs_of,
    level,
)
from kvstore.registry import Load

RATES = Rates(prefill_tok_s=1000.0, step_s=0.01, sequence_s=0.002)
WORK = Work(prompt=1500, answer=50, others=100)
IDLE = Candidate("a", "a-1", "ready", "f", Load(), RATES, max_running=8, kv_tokens=16_000)


def charged(sequences: int = 0, tokens: int = 0, prefill: int = 0, **fields: int) -> Candidate:
    """With half as many jobs as sequences."""
    return IDLE._replace(load=Load((sequences + 1) // 2, tokens, prefill, sequences), **fields)


def busy_s(running: int) -> float:
    """What the steps of so many others add to the wait for a first token."""
    return BUSY_STEPS * (0.01 + (running - 1) * 0.002)


def assert_cost(candidate: Candidate, expected: Cost, work: Work = WORK) -> None:
    found = cost(work, candidate)
    names = ("wait_s", "prefill_s", "fetch_s", "decode_s")
    assert [getattr(found, name) for name in names] == pytest.approx([getattr(expected, name) for name in names])


def test_on_an_idle_worker_a_job_costs_its_own_work() -> None:
    assert_cost(IDLE, Cost(wait_s=0, prefill_s=1.5, fetch_s=0, decode_s=50 * 0.01 + STALL * 1.5))
    assert cost(WORK, IDLE).total_s == pytest.approx(2.0 + STALL * 1.5)


def test_what_is_held_is_not_computed() -> None:
    assert_cost(IDLE._replace(held=1440), Cost(0, 0.06, 0, 0.5 + STALL * 0.06))


@pytest.mark.parametrize(
    ("prompt", "held", "found"), [(1500, 0, 0), (1500, 1488, 1488), (1504, 1504, 1503), (16, 16, 15), (1, 0, 0)]
)
def test_the_last_token_is_always_computed(prompt: int, held: int, found: int) -> None:
    work = Work(prompt, 1, 1)
    assert cached(work, IDLE._replace(held=held)) == found
    assert cost(work, IDLE._replace(held=held)).prefill_s == pytest.approx((prompt - found) / 1000)


def test_prompts_that_were_sent_before_are_waited_for() -> None:
    assert cost(WORK, charged(1, 900, 800)).wait_s == pytest.approx(0.8 + busy_s(1))


def test_a_job_slows_down_what_runs_and_is_slowed_down_by_it() -> None:
    own, others = 50 * (0.01 + 3 * 0.002), 3 * 50 * 0.002 + 4 * STALL * 1.5
    assert_cost(charged(3, 3000), Cost(busy_s(3), 1.5, 0, own + others))


def test_of_two_that_have_all_the_idle_one_is_cheaper_even_if_it_seems_a_little_slower() -> None:
    """A hot prefix that all hold: what is left of the prompt takes less than the steps of those that run."""
    work, slower = Work(prompt=1500, answer=8, others=8), Rates(800.0, 0.01, 0.002)
    idle, busy = IDLE._replace(held=1488, rates=slower), charged(1, 1600, held=1488)
    assert cost(work, idle).total_s < cost(work, busy).total_s


def test_choices_share_the_prompt_and_not_the_answers() -> None:
    work = replace(WORK, choices=4)
    own, others = 50 * (0.01 + 5 * 0.002), 2 * 4 * 50 * 0.002 + 3 * STALL * 1.5
    assert_cost(charged(2, 3000), Cost(busy_s(2), 1.5, 0, own + others), work)


def test_without_a_free_slot_answers_have_to_end_first() -> None:
    """As long as an answer takes on average, each slot becomes free once."""
    lifetime = 100 * (0.01 + 7 * 0.002)
    assert cost(WORK, charged(7)).wait_s == pytest.approx(busy_s(7))
    assert cost(WORK, charged(8)).wait_s == pytest.approx(busy_s(8) + lifetime / 8)
    assert cost(WORK, charged(24)).wait_s == pytest.approx(busy_s(8) + 17 / 8 * lifetime)
    assert cost(WORK, charged(99, max_running=0)).wait_s == pytest.approx(busy_s(99)), (
        "it has not told how many it runs"
    )


def test_without_room_in_the_pool_answers_have_to_end_first() -> None:
    lifetime = 100 * (0.01 + 3 * 0.002)
    full = charged(4, 30_000, 2_000, used=14_000)
    assert cost(WORK, full).wait_s == pytest.approx(2.0 + busy_s(4) + 1_500 / 16_000 * lifetime)
    assert cost(WORK, full._replace(held=1_499)).wait_s == pytest.approx(2.0 + busy_s(4) + 1 / 16_000 * lifetime)
    assert cost(WORK, full._replace(used=12_000)).wait_s == pytest.approx(2.0 + busy_s(4))


def test_a_pool_holds_no_more_than_what_is_charged_to_it() -> None:
    """The heartbeat is of the last second; since then all may have ended."""
    assert cost(WORK, charged(used=16_000)).wait_s == 0
    assert cost(WORK, charged(1, 600, used=16_000)).wait_s == pytest.approx(busy_s(1))


def test_answers_at_their_maximum_do_not_fill_a_pool() -> None:
    """A job without a limit of its own is charged the whole context."""
    assert cost(WORK, charged(2, 32_000, used=700)).wait_s == pytest.approx(busy_s(2))


def test_pages_are_fetched_where_that_is_faster() -> None:
    slow = IDLE._replace(held=160, stored=1280, rates=replace(RATES, fetch_tok_s=900.0))
    assert_cost(slow, Cost(0, 1.34, 0, 0.5 + STALL * 1.34))
    assert cached(WORK, slow) == 160
    fast = slow._replace(rates=replace(RATES, fetch_tok_s=6400.0))
    assert_cost(fast, Cost(0, 0.06, 0.2, 0.5 + STALL * 0.06))
    assert cached(WORK, fast) == 1440


def saved(work: Work, *candidates: Candidate) -> list[float]:
    return [each.saved_s for each in costs_of(work, candidates)]


HOLDER = charged(1, 1600, held=1488)


def test_what_nobody_else_asks_for_saves_nothing_to_anybody() -> None:
    candidates = [HOLDER, IDLE, charged(9, 9000)]
    assert costs_of(WORK, candidates) == [cost(WORK, each) for each in candidates]
    assert costs_of(WORK, []) == []


def test_one_more_place_for_what_many_ask_for_is_worth_what_it_saves_to_them() -> None:
    few, many = replace(WORK, repeats=1.2), replace(WORK, repeats=50.0)
    alone, as_holder = cost(WORK, IDLE).total_s, cost(WORK, IDLE._replace(held=1488)).total_s
    gain = cost(WORK, HOLDER).total_s - as_holder
    assert 1.2 * AHEAD_S / 2 * gain < alone - as_holder < 50 * AHEAD_S / 2 * gain
    assert saved(few, HOLDER, IDLE) == pytest.approx([0.0, 1.2 * AHEAD_S / 2 * gain])
    # No more than if it had the prefix already.
    assert saved(many, HOLDER, IDLE) == pytest.approx([0.0, alone - as_holder])
    assert costs_of(many, [HOLDER, IDLE])[1].total_s == pytest.approx(as_holder)
    # Where as much runs, the next ones would wait as long.
    assert saved(many, HOLDER, charged(1, 1600)) == [0.0, 0.0]


def test_a_prefix_has_no_more_places_than_jobs_that_begin_with_it() -> None:
    under_way = 2.0
    work = replace(WORK, repeats=under_way / cost(WORK, HOLDER).total_s)
    enough = [HOLDER] * math.ceil(COPIES * under_way)
    assert saved(work, *enough, IDLE)[-1] == 0.0
    assert saved(work, *enough[1:], IDLE)[-1] > 0.0
    # A worker that takes no jobs counts as none, and what it holds is not missed.
    assert saved(work, HOLDER._replace(state="draining", held=1499), *enough, IDLE)[-1] == 0.0


def test_who_can_not_take_the_job_is_no_holder() -> None:
    under_way = 2.0
    work = replace(WORK, repeats=under_way / cost(WORK, HOLDER).total_s)
    enough = [HOLDER] * math.ceil(COPIES * under_way)
    full = HOLDER._replace(incarnation="full-1", held=1499)
    short = costs_of(work, [full, *enough[1:], IDLE], {"full-1"})
    assert (short[0].saved_s, short[-1].saved_s > 0.0) == (0.0, True)
    assert costs_of(work, [full, *enough, IDLE], {"full-1"})[-1].saved_s == 0.0
    assert costs_of(work, [full, IDLE], {"full-1"}) == [cost(work, full), cost(work, IDLE)]


def rates_of(*workers: Rates, kinds: str = "") -> list[Rates]:
    return level(kinds or "f" * len(workers), workers)


def test_near_rates_of_equal_workers_are_taken_for_the_same() -> None:
    near = [Rates(1000, 0.010, 0.002), Rates(1400, 0.007, 0.0028), Rates(900, 0.012, 0.0016)]
    assert rates_of(*near) == [Rates(1000, 0.010, 0.002)] * 3


def test_rates_that_are_far_apart_are_not() -> None:
    found = rates_of(Rates(1000, 0.01, 0.002), Rates(1000, 0.01, 0.002), Rates(2000, 0.01, 0.002))
    assert [each.prefill_tok_s for each in found] == pytest.approx([1000, 1000, 2000 / NEAR])


@pytest.mark.parametrize("off", [NEAR, 1 / NEAR])
def test_no_rate_makes_a_worker_another_one_all_at_once(off: float) -> None:
    """A little beyond what counts as equal is nearly equal."""
    found = rates_of(RATES, RATES, Rates(1000 * off * (1.01 if off > 1 else 0.99), 0.01, 0.002))
    assert found[2].prefill_tok_s == pytest.approx(1000, rel=0.011)
    assert (found[2].prefill_tok_s > 1000) == (off > 1)


def test_what_a_sequence_adds_is_the_same_share_of_a_step_for_all_of_a_kind() -> None:
    """It is the difference of two long steps, and so may come out as anything."""
    found = rates_of(Rates(1000, 0.01, 0.000001), Rates(1000, 0.01, 0.002), Rates(1000, 0.03, 0.5))
    assert [each.step_s for each in found] == pytest.approx([0.01, 0.01, 0.03 / NEAR])
    assert [each.sequence_s for each in found] == pytest.approx([0.002, 0.002, 0.006 / NEAR])


def test_no_sequence_is_free() -> None:
    assert [each.sequence_s for each in rates_of(Rates(1000, 0.02, 0.000001))] == [0.02 * LEAST_SEQUENCE]


def test_workers_of_different_kinds_are_not_compared() -> None:
    found = rates_of(Rates(1000, 0.01, 0.002), Rates(1200, 0.01, 0.002), kinds="cg")
    assert [each.prefill_tok_s for each in found] == [1000, 1200]


def test_who_has_not_measured_is_taken_for_the_middle_of_its_kind_then_of_all() -> None:
    measured = Rates(3000, 0.03, 0.001)
    assert rates_of(measured, Rates()) == [measured, measured]
    assert rates_of(measured, Rates(), kinds="cg") == [measured, measured]
    assert rates_of(Rates(prefill_tok_s=3000), Rates()) == [replace(DEFAULTS, prefill_tok_s=3000)] * 2
    assert rates_of(Rates()) == [DEFAULTS]


def test_nobody_fetches_at_anothers_rate() -> None:
    found = rates_of(replace(RATES, fetch_tok_s=5000), RATES)
    assert [each.fetch_tok_s for each in found] == [5000, 0]
