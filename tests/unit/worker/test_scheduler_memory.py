"""When a step runs out of memory: parts of it that are not computed, and smaller steps from then on."""

from __future__ import annotations

import pytest

from tests.unit.worker.scheduling import add, finish, make, plan, step
from worker.scheduling.plan import Scheduled
from worker.scheduling.scheduler import GOOD_STEPS


@pytest.mark.parametrize(("done", "table"), [(0, []), (1, [0]), (4, [0]), (5, [0, 1]), (9, [0, 1, 2])])
def test_what_a_part_left_uncomputed_comes_in_a_later_step(done: int, table: list[int]) -> None:
    scheduler = make()
    one = add(scheduler, "a", 9, first=0)
    assert plan(scheduler.schedule()) == {"a": 9}
    scheduler.complete(Scheduled(one, done))
    if done == 9:
        one.tokens.append(7)
    scheduler.check_integrity()
    assert (one.block_table, one.num_computed) == (table, done)
    assert scheduler.pool.used_count == len(table)
    assert step(scheduler) == {"a": 9 - done or 1}
    assert one.num_sealed == 2


def test_a_copy_is_made_again_when_nothing_came_of_it() -> None:
    scheduler = make()
    first = add(scheduler, "a", 8, first=0)
    step(scheduler)
    scheduler.remove(first)
    again = add(scheduler, "b", 8, first=0)
    for _ in range(2):
        schedule = scheduler.schedule()
        assert (plan(schedule), schedule.copies) == ({"b": 1}, ((1, 2),))
        scheduler.complete(Scheduled(again, 0))
        scheduler.check_integrity()
        assert again.block_table == [0, 2]
    finish(scheduler, scheduler.schedule())
    assert again.block_table == [0, 1]
    assert scheduler.pool.used_count == 2


def test_a_sequence_can_end_while_its_copy_is_still_to_be_made() -> None:
    scheduler = make()
    first = add(scheduler, "a", 8, first=0)
    step(scheduler)
    scheduler.remove(first)
    again = add(scheduler, "b", 8, first=0)
    scheduler.schedule()
    scheduler.remove(again)
    scheduler.check_integrity()
    pool = scheduler.pool
    assert (pool.free_count, pool.cached_count) == (14, 2)
    # The block that was held goes before the one that it continues.
    assert pool.allocate(16)[-2:] == [1, 0]  # type: ignore[index]


def test_steps_become_half_as_long_and_grow_again_after_good_ones() -> None:
    scheduler = make(token_budget=32)
    scheduler.shrink()
    assert scheduler.token_budget == 16
    scheduler.shrink()
    assert scheduler.token_budget == 8
    budgets = []
    for _ in range(GOOD_STEPS + 2 * (GOOD_STEPS + 1)):
        scheduler.schedule()
        budgets.append(scheduler.token_budget)
    assert budgets == [8] * GOOD_STEPS + [16] * (GOOD_STEPS + 1) + [32] * (GOOD_STEPS + 1)


def test_a_step_that_ran_out_of_memory_is_no_good_one() -> None:
    scheduler = make(token_budget=32)
    scheduler.shrink()
    for _ in range(GOOD_STEPS):
        scheduler.schedule()
    scheduler.shrink()
    for _ in range(GOOD_STEPS):
        scheduler.schedule()
        assert scheduler.token_budget == 8


def test_a_shorter_step_goes_to_streams_first() -> None:
    scheduler = make(token_budget=16)
    add(scheduler, "stream", 2)
    step(scheduler)
    scheduler.shrink()
    scheduler.shrink()
    add(scheduler, "long", 9)
    assert [step(scheduler) for _ in range(3)] == [{"stream": 1, "long": 3}] * 3


def test_with_fewer_tokens_than_streams_they_take_turns() -> None:
    scheduler = make(num_blocks=64, max_running=20, token_budget=20)
    for name in "abcdefghijklmnopqrs":
        add(scheduler, name, 1)
    step(scheduler)
    add(scheduler, "t", 30)
    assert step(scheduler)["t"] == 1
    for _ in range(10):
        scheduler.shrink()
    assert scheduler.token_budget == 2
    turns = [tuple(step(scheduler)) for _ in range(10)]
    # Streams, and the first of the prompts, each once in ten steps.
    assert sorted(name for turn in turns for name in turn) == list("abcdefghijklmnopqrst")
    assert [tuple(step(scheduler)) for _ in range(10)] == turns


def test_with_as_many_tokens_as_streams_a_prompt_gets_its_turn() -> None:
    scheduler = make(token_budget=4)
    for name in "ab":
        add(scheduler, name, 1)
    step(scheduler)
    scheduler.shrink()
    long = add(scheduler, "long", 3)
    # Nothing is left to let it in.
    assert step(scheduler) == {"a": 1, "b": 1}
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"b": 1, "long": 1}
    add(scheduler, "c", 1, priority=1)
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"c": 1, "long": 1}
    assert long.num_uncomputed == 1


def test_a_prompt_is_among_those_that_take_turns() -> None:
    scheduler = make(token_budget=8)
    for name in "ab":
        add(scheduler, name, 1)
    add(scheduler, "long", 30)
    assert step(scheduler) == {"a": 1, "b": 1, "long": 6}
    for _ in range(2):
        scheduler.shrink()
    assert scheduler.token_budget == 2
    turns = [step(scheduler) for _ in range(4)]
    assert turns == [{"a": 1, "b": 1}, {"long": 1, "a": 1}, {"b": 1, "a": 1}, {"long": 1, "a": 1}]


def test_a_budget_is_never_less_than_one_token() -> None:
    scheduler = make(token_budget=2)
    for _ in range(3):
        scheduler.shrink()
    assert scheduler.token_budget == 1
    add(scheduler, "a", 3)
    assert [step(scheduler) for _ in range(4)] == [{"a": 1}] * 4
