"""What the scheduler makes of prefixes that are known, or being computed."""

from __future__ import annotations

import pytest

from tests.unit.worker.scheduling import BS, add, add_prompt, finish, make, names, plan, step


def test_a_prefix_is_shared_once_it_is_computed() -> None:
    scheduler = make()
    one = add(scheduler, "a", 9, first=0)
    step(scheduler)
    two = add(scheduler, "b", 11, first=0)
    assert step(scheduler) == {"a": 1, "b": 3}
    assert (one.block_table, two.block_table) == ([0, 1, 2], [0, 1, 3])
    assert two.cached_tokens == 8
    assert (scheduler.prefix_queried, scheduler.prefix_hit) == (20, 8)


def test_a_prefix_of_a_half_computed_prompt_is_shared() -> None:
    scheduler = make(token_budget=6)
    add(scheduler, "a", 16, first=0)
    step(scheduler)
    two = add(scheduler, "b", 6, first=0)
    assert step(scheduler) == {"a": 6}
    assert step(scheduler) == {"a": 4, "b": 2}
    assert two.cached_tokens == 4


def test_output_is_cached_like_a_prompt() -> None:
    scheduler = make()
    one = add(scheduler, "a", 4, first=0)
    for _ in range(6):
        step(scheduler)
    history = tuple(one.tokens)
    assert one.num_computed == 9
    scheduler.remove(one)
    two = add_prompt(scheduler, "b", history)
    assert step(scheduler) == {"b": 2}
    assert two.cached_tokens == 8


def test_salts_keep_prefixes_apart() -> None:
    scheduler = make()
    hits = []
    for index, salt in enumerate(("A", "B", "", "A")):
        made = add(scheduler, f"{index}", 9, first=0, salt=salt)
        step(scheduler)
        hits.append(made.cached_tokens)
    assert hits == [0, 0, 0, 8]


# F05
def test_what_was_cached_at_submission_may_be_gone_at_admission() -> None:
    scheduler = make(num_blocks=4, max_running=1)
    scheduler_first = add(scheduler, "a", 9, first=0)
    step(scheduler)
    scheduler.remove(scheduler_first)
    big = add(scheduler, "big", 14)
    late = add(scheduler, "late", 9, first=0)
    step(scheduler)
    assert scheduler.pool.evictions == 2
    scheduler.remove(big)
    assert step(scheduler) == {"late": 9}
    assert late.cached_tokens == 0


def test_evicted_by_admission_are_never_the_hits_themselves() -> None:
    scheduler = make(num_blocks=4)
    first = add(scheduler, "a", 9, first=0)
    step(scheduler)
    scheduler.remove(first)
    assert (scheduler.pool.free_count, scheduler.pool.cached_count) == (2, 2)
    again = add(scheduler, "b", 15, first=0)
    step(scheduler)
    assert again.block_table[:2] == [0, 1]
    assert scheduler.pool.evictions == 0


# F04: what is scheduled follows from what is found, not from what was there before
def test_chunks_after_a_hit() -> None:
    scheduler = make(token_budget=7)
    warm = add_prompt(scheduler, "warm", range(16))
    while warm.num_output == 0:
        step(scheduler)
    scheduler.remove(warm)
    long = add_prompt(scheduler, "long", [*range(16), *range(100, 113)])
    steps = [(step(scheduler), list(long.block_table)) for _ in range(3)]
    assert steps == [
        ({"long": 7}, [0, 1, 2, 3, 4, 5]),
        ({"long": 6}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"long": 1}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ]
    assert long.cached_tokens == 16


# Whole prompts that are known


# F01
@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 3), (5, 4), (7, 4), (8, 7), (9, 8), (12, 11), (13, 12)])
def test_of_a_fully_cached_prompt_the_last_token_is_computed(length: int, hit: int) -> None:
    scheduler = make()
    first = add(scheduler, "a", length, first=0)
    step(scheduler)
    scheduler.remove(first)
    for name in "bc":
        again = add(scheduler, name, length, first=0)
        assert step(scheduler) == {name: length - hit}
        assert again.cached_tokens == hit
        scheduler.remove(again)


def test_the_last_token_of_a_known_prompt_is_computed_into_a_copy_that_goes_again() -> None:
    scheduler = make(num_blocks=4)
    first = add(scheduler, "a", 8, first=0)
    step(scheduler)
    scheduler.remove(first)
    again = add(scheduler, "b", 8, first=0)
    schedule = scheduler.schedule()
    assert (plan(schedule), schedule.copies) == ({"b": 1}, ((1, 2),))
    assert again.block_table == [0, 2]
    assert scheduler.pool.used_count == 3
    finish(scheduler, schedule)
    assert again.block_table == [0, 1]
    assert (scheduler.pool.free_count, scheduler.pool.used_count) == (2, 2)
    assert scheduler.schedule().copies == ()
    assert again.block_table == [0, 1, 2]


def test_a_known_prompt_is_copied_while_another_one_uses_it() -> None:
    scheduler = make(num_blocks=4)
    one = add(scheduler, "a", 8, first=0)
    step(scheduler)
    two = add(scheduler, "b", 8, first=0)
    schedule = scheduler.schedule()
    assert (plan(schedule), schedule.copies) == ({"a": 1, "b": 1}, ((1, 3),))
    finish(scheduler, schedule)
    assert (one.block_table, two.block_table) == ([0, 1, 2], [0, 1])


def test_without_room_for_the_copy_the_last_block_of_a_known_prompt_is_computed_again() -> None:
    scheduler = make(num_blocks=4)
    first = add(scheduler, "a", 8, first=0)
    step(scheduler)
    scheduler.remove(first)
    add(scheduler, "other", 7)
    step(scheduler)
    assert (scheduler.pool.free_count, scheduler.pool.cached_count) == (0, 2)
    again = add(scheduler, "b", 8, first=0)
    schedule = scheduler.schedule()
    assert (plan(schedule), schedule.copies) == ({"other": 1, "b": 4}, ())
    assert (again.block_table, again.cached_tokens) == ([0, 1], 4)
    finish(scheduler, schedule)


def test_blocks_of_one_token_are_never_copied() -> None:
    scheduler = make(block_size=1)
    first = add(scheduler, "a", 3, first=0)
    step(scheduler)
    scheduler.remove(first)
    again = add(scheduler, "b", 3, first=0)
    schedule = scheduler.schedule()
    assert (plan(schedule), schedule.copies) == ({"b": 1}, ())
    assert again.block_table == [0, 1, 3]
    finish(scheduler, schedule)
    assert again.block_table == [0, 1, 2]


# F02
def test_a_full_hit_does_not_break_the_chain() -> None:
    scheduler = make()
    for name, length, hit in (("a", 16, 0), ("b", 16, 15), ("c", 20, 16), ("d", 21, 20)):
        made = add(scheduler, name, length, first=0)
        step(scheduler)
        assert made.cached_tokens == hit
        scheduler.remove(made)


def test_blocks_that_are_in_use_anyway_need_no_room() -> None:
    scheduler = make(num_blocks=5)
    add(scheduler, "a", 13, first=0)
    step(scheduler)
    assert scheduler.pool.available == 1
    add(scheduler, "b", 11, first=0)
    add(scheduler, "c", 1)
    assert step(scheduler) == {"a": 1, "b": 3}
    assert scheduler.pool.available == 0
    assert names(scheduler.waiting) == ["c"]


# What is offered


def test_blocks_are_offered_only_after_their_step() -> None:
    scheduler = make()
    one = add(scheduler, "a", 9, first=0)
    schedule = scheduler.schedule()
    assert not any(map(scheduler.pool.hash_of, one.block_table))
    finish(scheduler, schedule)
    assert [scheduler.pool.hash_of(block) for block in one.block_table] == [*one.hash_blocks(2), None]


# F06
def test_equal_contents_become_one_block() -> None:
    """Two streams that say the same: their blocks are filled in the same step."""
    scheduler = make(num_blocks=8)
    pair = [add_prompt(scheduler, name, [7, 7, 7, 7, 7]) for name in "ab"]
    for _ in range(4):
        step(scheduler)
    one, two = pair
    assert (one.block_table, two.block_table) == ([0, 1], [0, 2])
    step(scheduler)
    assert (one.block_table, two.block_table) == ([0, 1, 3], [0, 1])
    scheduler.remove(one)
    assert (scheduler.pool.free_count, scheduler.pool.cached_count) == (6, 0)
    step(scheduler)
    assert two.block_table == [0, 1, 3]
    scheduler.remove(two)
    # As often as one likes.
    for _ in range(3):
        for name in "cdef":
            add_prompt(scheduler, name, [7] * 9)
        for _ in range(3):
            step(scheduler)
        for running in [*scheduler.running]:
            scheduler.remove(running)
        assert scheduler.pool.available == 8
        scheduler.pool.clear()


def test_forgotten_blocks_stay_with_their_users_but_nothing_after_them_is_offered() -> None:
    scheduler = make()
    one = add(scheduler, "a", 9, first=0)
    step(scheduler)
    two = add(scheduler, "b", 11, first=0)
    step(scheduler)
    scheduler.pool.forget(one.block_table)
    scheduler.remove(one)
    for _ in range(3):
        step(scheduler)
    assert (two.block_table, two.num_sealed) == ([0, 1, 3, 2], 2)
    late = add(scheduler, "c", 9, first=0)
    step(scheduler)
    assert (late.cached_tokens, late.block_table) == (0, [4, 5, 6])
    scheduler.remove(two)
    assert scheduler.pool.cached_count == 0
    # The new one's blocks are good.
    third = add(scheduler, "d", 9, first=0)
    step(scheduler)
    assert third.cached_tokens == 8


def test_after_a_clear_running_sequences_go_on_and_new_ones_find_nothing() -> None:
    scheduler = make()
    one = add(scheduler, "a", 9, first=0)
    step(scheduler)
    scheduler.pool.clear()
    two = add(scheduler, "b", 9, first=0)
    assert step(scheduler) == {"a": 1, "b": 9}
    assert (one.block_table, two.block_table) == ([0, 1, 2], [3, 4, 5])
    for sequence in (one, two):
        scheduler.remove(sequence)
    assert (scheduler.pool.free_count, scheduler.pool.cached_count) == (14, 2)


def test_without_a_cache_only_running_sequences_are_hit() -> None:
    scheduler = make(cache_blocks=0)
    hits = []
    one = add(scheduler, "a", 9, first=0)
    step(scheduler)
    for name in "bc":
        later = add(scheduler, name, 9, first=0)
        step(scheduler)
        hits.append(later.cached_tokens)
        scheduler.remove(later)
        if name == "b":
            scheduler.remove(one)
    assert hits == [8, 0]
    assert scheduler.pool.cached_count == 0


# F07
def test_a_prefix_whose_hash_is_taken_is_computed_and_stays_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.sequence.child", lambda parent, tokens: bytes([len(parent) % 2]))
    scheduler = make()
    one = add(scheduler, "a", 9, first=0)
    step(scheduler)
    two = add(scheduler, "b", 9, first=100)
    assert step(scheduler) == {"a": 1, "b": 9}
    assert (two.cached_tokens, two.num_sealed, two.block_table) == (0, 0, [3, 4, 5])
    scheduler.remove(two)
    assert scheduler.pool.cached_count == 0
    three = add(scheduler, "c", 9, first=0)
    step(scheduler)
    assert three.cached_tokens == one.num_sealed * BS
