"""Equal prefixes that arrive together: one computes, the others wait for it."""

from __future__ import annotations

import pytest

from tests.unit.worker.scheduling import add, add_prompt, finish, make, names, plan, step
from worker.sequence import Status


def test_a_twin_waits_for_the_step_that_computes_its_prefix() -> None:
    scheduler = make()
    one, two = add(scheduler, "a", 9, first=0), add(scheduler, "b", 9, first=0)
    assert step(scheduler) == {"a": 9}
    assert step(scheduler) == {"a": 1, "b": 1}
    assert (one.block_table, two.block_table) == ([0, 1, 2], [0, 1, 3])
    assert (two.cached_tokens, scheduler.prefix_queried, scheduler.prefix_hit) == (8, 18, 8)


def test_of_equal_prompts_of_whole_blocks_one_token_each_is_computed() -> None:
    scheduler = make()
    add(scheduler, "a", 8, first=0)
    for name in "bcd":
        add(scheduler, name, 8, first=0)
    assert step(scheduler) == {"a": 8}
    schedule = scheduler.schedule()
    assert (plan(schedule), schedule.copies) == ({"a": 1, "b": 1, "c": 1, "d": 1}, ((1, 3), (1, 4), (1, 5)))
    finish(scheduler, schedule)
    assert [sequence.block_table for sequence in scheduler.running] == [[0, 1, 2], [0, 1], [0, 1], [0, 1]]


def test_a_follower_waits_as_far_as_the_prefix_is_common() -> None:
    scheduler = make(token_budget=6)
    add(scheduler, "a", 24, first=0)
    add_prompt(scheduler, "b", [*range(8), *range(100, 106)])
    assert [step(scheduler) for _ in range(2)] == [{"a": 6}, {"a": 6}]
    # The common blocks are there, but no tokens are left beside its leader's.
    assert [step(scheduler) for _ in range(3)] == [{"a": 6}, {"a": 6}, {"a": 1, "b": 5}]
    assert scheduler.running[1].cached_tokens == 8


def test_a_prefix_that_ends_within_a_block_is_not_waited_for() -> None:
    scheduler = make()
    add(scheduler, "a", 7, first=0)
    add_prompt(scheduler, "b", [0, 1, 2, 9, 9])
    assert step(scheduler) == {"a": 7, "b": 5}


def test_others_pass_a_follower_for_which_they_leave_room() -> None:
    scheduler = make(num_blocks=6)
    add(scheduler, "a", 9, first=0)
    follower = add(scheduler, "b", 11, first=0)
    add(scheduler, "c", 8)
    add(scheduler, "d", 1)
    # Three blocks are left, of which the follower will need one.
    assert step(scheduler) == {"a": 9, "c": 8}
    assert names(scheduler.waiting) == ["b", "d"]
    assert step(scheduler) == {"a": 1, "c": 1}
    assert follower.preemptions == 0


def test_who_would_take_the_room_of_a_follower_waits() -> None:
    scheduler = make(num_blocks=6)
    add(scheduler, "a", 9, first=0)
    add(scheduler, "b", 11, first=0)
    add(scheduler, "c", 9)
    assert step(scheduler) == {"a": 9}
    assert step(scheduler) == {"a": 1, "b": 3}
    assert names(scheduler.waiting) == ["c"]


def test_who_would_take_the_place_of_a_follower_waits() -> None:
    scheduler = make(max_running=2)
    add(scheduler, "a", 9, first=0)
    add(scheduler, "b", 9, first=0)
    add(scheduler, "c", 1)
    assert step(scheduler) == {"a": 9}
    assert step(scheduler) == {"a": 1, "b": 1}
    assert names(scheduler.waiting) == ["c"]


def test_a_follower_goes_on_as_soon_as_anybody_has_offered_its_prefix() -> None:
    """Two compute it, one of them slowly."""
    scheduler = make(token_budget=8, logit_rows=1)
    add(scheduler, "fast", 17, first=0)
    assert step(scheduler) == {"fast": 8}
    add(scheduler, "slow", 17, first=0, priority=1, scored=True)
    assert step(scheduler) == {"slow": 1, "fast": 7}
    add(scheduler, "follower", 17, first=0)
    assert step(scheduler) == {"slow": 1, "fast": 2}
    assert scheduler.waiting[0].awaits is not None
    assert step(scheduler) == {"fast": 1, "slow": 1, "follower": 1}


def test_a_follower_whose_leader_ends_goes_on_from_what_it_left() -> None:
    scheduler = make(token_budget=5)
    leader, follower = add(scheduler, "a", 16, first=0), add(scheduler, "b", 16, first=0)
    assert [step(scheduler) for _ in range(2)] == [{"a": 5}, {"a": 5}]
    assert follower.status is Status.WAITING
    scheduler.remove(leader)
    assert step(scheduler) == {"b": 5}
    assert follower.cached_tokens == 8


def test_a_preempted_leader_leads_again() -> None:
    scheduler = make(num_blocks=8, token_budget=16, logit_rows=6)
    old = add(scheduler, "old", 4)
    step(scheduler)
    leader = add(scheduler, "leader", 20, first=0, scored=True)
    assert step(scheduler) == {"old": 1, "leader": 6}
    follower = add(scheduler, "follower", 14, first=0)
    assert step(scheduler) == {"old": 1, "leader": 6}
    assert follower.awaits == leader.hashes[2]
    old.tokens += range(500, 515)
    assert step(scheduler) == {"old": 16}
    assert leader.preemptions == 1
    assert names(scheduler.waiting) == ["leader", "follower"]
    old.tokens += range(600, 607)
    assert step(scheduler) == {"old": 8}
    assert scheduler.pool.available == 0
    scheduler.remove(old)
    assert step(scheduler) == {"leader": 16}


def test_a_follower_whose_leader_is_forgotten_computes_for_itself() -> None:
    scheduler = make(logit_rows=5)
    leader, follower = add(scheduler, "a", 14, first=0, scored=True), add(scheduler, "b", 14, first=0)
    assert step(scheduler) == {"a": 5}
    assert follower.awaits == leader.hashes[2]
    scheduler.pool.forget(leader.block_table)
    assert step(scheduler) == {"a": 5}
    # The leader's second block could not be offered any more, nor will its third.
    assert step(scheduler) == {"a": 4, "b": 14}
    assert follower.cached_tokens == 0


# F07
def test_a_leader_that_can_offer_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.sequence.child", lambda parent, tokens: bytes([len(parent) % 2]))
    scheduler = make(token_budget=6)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        add(scheduler, name, 13, first=first)
    ran = [step(scheduler) for _ in range(12)]
    assert all(ran)
    assert min(sequence.num_output for sequence in scheduler.running) > 0
    assert len(scheduler.running) == 3


# Prompts whose logits are wanted


def test_for_scores_everything_is_computed_and_then_shared() -> None:
    scheduler = make()
    add(scheduler, "a", 9, first=0)
    step(scheduler)
    scored = add(scheduler, "b", 9, first=0, scored=True)
    schedule = scheduler.schedule()
    assert plan(schedule) == {"a": 1, "b": 9}
    assert scored.block_table == [3, 4, 5]
    finish(scheduler, schedule)
    assert scored.block_table == [0, 1, 5]
    assert (scored.cached_tokens, scored.scored, scored.unscored) == (0, 8, 0)
    assert (scheduler.prefix_queried, scheduler.prefix_hit) == (9, 0)


def test_who_is_scored_does_not_follow_but_leads() -> None:
    scheduler = make()
    add(scheduler, "a", 9, first=0, scored=True)
    add(scheduler, "b", 9, first=0, scored=True)
    add(scheduler, "c", 9, first=0)
    assert step(scheduler) == {"a": 9, "b": 9}
    assert [sequence.block_table for sequence in scheduler.running] == [[0, 1, 2], [0, 1, 5]]
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_a_step_gives_so_many_scores_in_all() -> None:
    scheduler = make(logit_rows=3)
    add(scheduler, "a", 9, scored=True)
    add(scheduler, "b", 5, scored=True)
    add(scheduler, "c", 2)
    # The last position of a prompt is drawn from, not scored.
    assert [step(scheduler) for _ in range(2)] == [{"a": 3, "c": 2}, {"c": 1, "a": 3}]
    assert step(scheduler) == {"c": 1, "a": 3, "b": 1}
    assert step(scheduler) == {"a": 1, "c": 1, "b": 4}


def test_nobody_takes_the_blocks_that_a_running_prompt_will_need() -> None:
    scheduler = make(num_blocks=12, logit_rows=3)
    add(scheduler, "b", 17, scored=True)
    assert step(scheduler) == {"b": 3}
    add(scheduler, "a", 17, scored=True, priority=1)
    add(scheduler, "c", 9)
    add(scheduler, "d", 1)
    # Ten of the twelve blocks are for "a" and "b", whether they get tokens now or not.
    assert step(scheduler) == {"a": 3}
    assert names(scheduler.waiting) == ["c", "d"]
    scheduler.remove(scheduler.waiting[0])
    assert step(scheduler) == {"a": 3, "d": 1}


def test_who_passes_one_that_waits_for_scores_leaves_room_for_it() -> None:
    scheduler = make(num_blocks=8, logit_rows=3)
    add(scheduler, "a", 9, scored=True)
    add(scheduler, "b", 9, scored=True)
    add(scheduler, "c", 9)
    assert step(scheduler) == {"a": 3}
    assert names(scheduler.waiting) == ["b", "c"]


@pytest.mark.parametrize(("scored", "hit"), [(0, 0), (3, 0), (4, 4), (6, 4), (8, 8), (11, 8), (14, 12), (15, 15)])
def test_hits_end_where_logits_are_wanted(scored: int, hit: int) -> None:
    scheduler = make()
    first = add(scheduler, "a", 16, first=0)
    step(scheduler)
    scheduler.remove(first)
    again = add(scheduler, "b", 16, first=0, scored=True)
    again.scored = scored
    assert step(scheduler) == {"b": 16 - hit}
    assert again.unscored == 0


def test_what_has_been_scored_may_be_found_again() -> None:
    scheduler = make(num_blocks=6, token_budget=8, logit_rows=6)
    old = add(scheduler, "old", 4)
    step(scheduler)
    scored = add(scheduler, "s", 16, first=0, scored=True)
    assert [step(scheduler) for _ in range(2)] == [{"old": 1, "s": 6}, {"old": 1, "s": 6}]
    assert (scored.scored, scored.block_table) == (12, [2, 3, 4])
    old.tokens += range(500, 507)
    assert step(scheduler) == {"old": 8}
    assert scored.status is Status.WAITING
    scheduler.remove(old)
    schedule = scheduler.schedule()
    # Two of its three blocks were not evicted. It is recomputed from there, and scored from position 12.
    assert (plan(schedule), scored.num_computed) == ({"s": 8}, 8)
    assert scored.to_score(8) == 3
    finish(scheduler, schedule)
    assert scored.unscored == 0


@pytest.mark.parametrize("leader_priority", [-1, -5, -100])
def test_nobody_waits_for_a_leader_with_a_worse_standing(leader_priority: int) -> None:
    """Prompts in between keep such a leader from computing; its follower is not to starve with it."""
    scheduler = make(num_blocks=64, token_budget=32, max_running=64)
    add(scheduler, "leader", 40, first=0, priority=leader_priority)
    step(scheduler)
    add(scheduler, "between", 32)
    follower = add(scheduler, "follower", 40, first=0, priority=1)
    # The leader has got as far as 32, which the follower takes over.
    assert step(scheduler) == {"follower": 8, "between": 24}
    assert follower.cached_tokens == 32
