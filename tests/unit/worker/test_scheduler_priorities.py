"""Priorities: who goes first, whose place it takes, and that nobody starves."""

from __future__ import annotations

import pytest

from tests.unit.worker.scheduling import add, finish, make, names, plan, step
from worker.sequence import Status


def test_the_higher_priority_goes_first() -> None:
    scheduler = make(max_running=1)
    for name, priority in (("low", -1), ("a", 0), ("high", 1), ("b", 0)):
        add(scheduler, name, 2, priority=priority)
    assert names(scheduler.waiting) == ["high", "a", "b", "low"]


@pytest.mark.parametrize(("steps", "order"), [(0, ["late", "early"]), (15, ["late", "early"]), (16, ["early", "late"])])
def test_a_unit_of_priority_is_worth_sixteen_steps(steps: int, order: list[str]) -> None:
    scheduler = make(max_running=1)
    add(scheduler, "running", 2, priority=2)
    step(scheduler)
    add(scheduler, "early", 2)
    for _ in range(steps):
        step(scheduler)
    add(scheduler, "late", 2, priority=1)
    assert names(scheduler.waiting) == order


def test_a_prompt_of_a_higher_priority_gets_its_chunk_first() -> None:
    scheduler = make(token_budget=8)
    add(scheduler, "low", 20)
    assert step(scheduler) == {"low": 8}
    add(scheduler, "high", 11, priority=1)
    assert list(step(scheduler).items()) == [("high", 8)]
    assert list(step(scheduler).items()) == [("high", 3), ("low", 5)]


# G07
def test_a_higher_priority_takes_the_place_of_the_lower_one_with_the_worst_standing() -> None:
    scheduler = make(max_running=2)
    add(scheduler, "low 1", 3)
    low = add(scheduler, "low 2", 3)
    for _ in range(2):
        step(scheduler)
    add(scheduler, "high", 3, priority=1)
    # It had its token of this step already; that is taken back.
    assert step(scheduler) == {"low 1": 1, "high": 3}
    assert names(scheduler.waiting) == ["low 2"]
    assert (low.preemptions, low.displacements) == (1, 1)
    assert (scheduler.preemptions, scheduler.displacements) == (1, 1)
    scheduler.remove(scheduler.running[0])
    # Its first block was still known.
    assert step(scheduler) == {"low 1": 1, "low 2": 1}


# G04
def test_a_higher_priority_takes_the_blocks_of_lower_ones() -> None:
    scheduler = make(num_blocks=4)
    for name in ("low 1", "low 2"):
        add(scheduler, name, 6)
    step(scheduler)
    high = add(scheduler, "high", 7, priority=1)
    schedule = scheduler.schedule()
    assert plan(schedule) == {"low 1": 1, "high": 7}
    assert high.block_table == [3, 2]
    finish(scheduler, schedule)
    ended = []
    for _ in range(40):
        assert step(scheduler) or not scheduler.running
        for one in [each for each in scheduler.running if each.num_output == 5]:
            scheduler.remove(one)
            ended.append(one.request.request_id)
    assert ended == ["high", "low 1", "low 2"]
    assert scheduler.pool.used_count == 0


def test_nobody_is_displaced_in_vain() -> None:
    """The high one needs more blocks than the low one would leave it."""
    scheduler = make(num_blocks=6)
    add(scheduler, "old", 11, priority=1)
    add(scheduler, "low", 6)
    step(scheduler)
    add(scheduler, "high", 13, priority=1)
    assert step(scheduler) == {"old": 1, "low": 1}
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"low": 1, "high": 13}
    assert scheduler.displacements == 0


def test_several_are_displaced_when_it_takes_several() -> None:
    scheduler = make(num_blocks=6)
    for name in ("low 1", "low 2", "low 3"):
        add(scheduler, name, 6)
    step(scheduler)
    add(scheduler, "high", 13, priority=1)
    assert step(scheduler) == {"low 1": 1, "high": 13}
    assert names(scheduler.waiting) == ["low 2", "low 3"]


def test_what_the_displaced_share_is_counted_once_and_kept_for_who_needs_it() -> None:
    scheduler = make(num_blocks=5)
    for name in ("low 1", "low 2"):
        add(scheduler, name, 9, first=0)
    for _ in range(2):
        step(scheduler)
    assert [sequence.block_table for sequence in scheduler.running] == [[0, 1, 2], [0, 1, 3]]
    # Needs two blocks beside the two that it shares with them; one is free.
    high = add(scheduler, "high", 15, first=0, priority=1)
    assert step(scheduler) == {"low 1": 1, "high": 7}
    assert high.block_table == [0, 1, 3, 4]


def test_hits_survive_the_displacement_of_their_users_without_a_cache() -> None:
    scheduler = make(num_blocks=4, cache_blocks=0)
    add(scheduler, "low", 9, first=0)
    step(scheduler)
    high = add(scheduler, "high", 15, first=0, priority=1)
    assert step(scheduler) == {"high": 7}
    assert (high.block_table, high.cached_tokens) == ([0, 1, 2, 3], 8)


def test_equal_priority_and_better_standing_are_not_displaced() -> None:
    scheduler = make(max_running=2)
    add(scheduler, "old", 2)
    for _ in range(17):
        step(scheduler)
    add(scheduler, "equal", 2, priority=1)
    step(scheduler)
    add(scheduler, "high", 2, priority=1)
    assert step(scheduler) == {"old": 1, "equal": 1}
    assert scheduler.displacements == 0


def test_a_sequence_is_displaced_twice_at_most() -> None:
    scheduler = make(max_running=1)
    low = add(scheduler, "low", 2)
    for name in "abc":
        step(scheduler)
        add(scheduler, name, 2, priority=1)
        expected = {"low": 1} if name == "c" else {name: 2}
        assert step(scheduler) == expected
        if name != "c":
            scheduler.remove(scheduler.running[0])
    assert low.displacements == 2
    assert names(scheduler.waiting) == ["c"]


def test_who_can_not_be_displaced_any_more_is_passed_over() -> None:
    scheduler = make(max_running=2)
    add(scheduler, "first", 2)
    add(scheduler, "second", 2)
    for name in "ab":
        step(scheduler)
        add(scheduler, name, 2, priority=1)
        assert step(scheduler) == {"first": 1, name: 2}
        scheduler.remove(scheduler.running[0])
    step(scheduler)
    add(scheduler, "c", 2, priority=1)
    assert step(scheduler) == {"second": 1, "c": 2}


def test_no_sequence_starves_behind_higher_priorities() -> None:
    """Such a one arrives in every step; each lasts four steps."""
    scheduler = make(max_running=2)
    low = add(scheduler, "low", 2, priority=-2)
    for number in range(120):
        add(scheduler, f"{number}", 2, first=number * 10, priority=1)
        step(scheduler)
        for one in [each for each in scheduler.running if each.num_output == 4]:
            scheduler.remove(one)
        if low.status is Status.FINISHED:
            break
    # Of those that came in the first 48 steps all go first, at two in four steps.
    assert 96 <= number <= 104


def test_who_passes_a_follower_by_displacement_leaves_a_place_for_it() -> None:
    scheduler = make(num_blocks=64, max_running=3, logit_rows=1)
    add(scheduler, "low", 2, priority=-5)
    add(scheduler, "lower", 2, priority=-6)
    add(scheduler, "leader", 40, first=0, scored=True)
    assert step(scheduler) == {"leader": 1, "low": 2, "lower": 2}
    add(scheduler, "follower", 40, first=0)
    for _ in range(20):
        assert step(scheduler) == {"leader": 1, "low": 1, "lower": 1}
    add(scheduler, "high", 2, priority=1)
    # One of the two places would be enough for the high one.
    assert step(scheduler) == {"leader": 1, "high": 2}
    assert names(scheduler.waiting) == ["follower", "low", "lower"]
