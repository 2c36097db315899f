"""Choices of one request: they share their prompt's blocks, and copy what they write to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.scheduling import add, finish, make, names, plan, step
from worker.sequence import Status

if TYPE_CHECKING:
    from worker.scheduling.scheduler import Scheduler
    from worker.sequence import Sequence


def fork(scheduler: Scheduler, parent: Sequence, count: int) -> list[Sequence]:
    """Run the parent's prompt and fork it. Choice ``c`` says 50 + c first, and 7 from then on."""
    schedule = scheduler.schedule()
    for entry in schedule.entries:
        scheduler.complete(entry)
        if entry.sequence is not parent and entry.sequence.num_uncomputed == 0:
            entry.sequence.tokens.append(7)
    family = [parent, *scheduler.fork(parent, range(1, count))]
    for sequence in family:
        sequence.tokens.append(50 + sequence.choice)
    scheduler.check_integrity()
    return family


def tables(family: list[Sequence]) -> list[list[int]]:
    return [sequence.block_table for sequence in family]


def test_all_but_the_last_writer_copy_a_partly_filled_block() -> None:
    scheduler = make()
    family = fork(scheduler, add(scheduler, "a", 6), 3)
    assert tables(family) == [[0, 1]] * 3
    assert scheduler.pool.used_count == 2
    schedule = scheduler.schedule()
    assert plan(schedule) == {"a": 1, "a1": 1, "a2": 1}
    assert schedule.copies == ((1, 2), (1, 3))
    assert tables(family) == [[0, 2], [0, 3], [0, 1]]
    finish(scheduler, schedule)
    assert scheduler.schedule().copies == ()
    assert scheduler.pool.used_count == 4


def test_a_prompt_of_whole_blocks_is_shared_without_copies() -> None:
    scheduler = make()
    family = fork(scheduler, add(scheduler, "a", 8), 3)
    schedule = scheduler.schedule()
    assert schedule.copies == ()
    assert tables(family) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


def test_the_only_one_left_writes_in_place() -> None:
    scheduler = make()
    family = fork(scheduler, add(scheduler, "a", 6), 2)
    scheduler.remove(family[0])
    schedule = scheduler.schedule()
    assert (plan(schedule), schedule.copies) == ({"a1": 1}, ())
    assert family[1].block_table == [0, 1]


def test_choices_know_what_their_parent_knows() -> None:
    scheduler = make()
    warm = add(scheduler, "warm", 9, first=0)
    step(scheduler)
    scheduler.remove(warm)
    family = fork(scheduler, add(scheduler, "a", 9, first=0, n=3), 3)
    assert [sequence.choice for sequence in family] == [0, 1, 2]
    assert [sequence.cached_tokens for sequence in family] == [8, 8, 8]
    assert [(sequence.num_sealed, len(sequence.hashes)) for sequence in family] == [(2, 2)] * 3
    assert [*scheduler.running] == family
    # Looked up once.
    assert (scheduler.prefix_queried, scheduler.prefix_hit) == (18, 8)
    # Nobody else's list changes with one's own.
    family[1].hashes.clear()
    family[1].tokens.append(9)
    assert (len(family[0].hashes), family[0].num_tokens) == (2, 10)


def test_choices_of_a_scored_prompt_have_nothing_left_to_score() -> None:
    scheduler = make()
    parent = add(scheduler, "a", 6, scored=True)
    (entry,) = scheduler.schedule().entries
    assert parent.to_score(entry.num_tokens) == 5
    scheduler.complete(entry)
    (child,) = scheduler.fork(parent, [1])
    assert (child.unscored, child.to_score(1)) == (0, 0)


def test_choices_without_a_slot_wait_and_hold_nothing() -> None:
    scheduler = make(max_running=2)
    parent = add(scheduler, "a", 6)
    other = add(scheduler, "b", 6)
    step_one = scheduler.schedule()
    assert plan(step_one) == {"a": 6, "b": 6}
    for entry in step_one.entries:
        scheduler.complete(entry)
    scheduler.remove(other)
    family = [parent, *scheduler.fork(parent, range(1, 4))]
    for sequence in family:
        sequence.tokens.append(50 + sequence.choice)
    scheduler.check_integrity()
    # In their parent's place in the line: before all that came after it.
    add(scheduler, "c", 2)
    assert names(scheduler.waiting) == ["a2", "a3", "c"]
    assert tables(family[2:]) == [[], []]
    assert step(scheduler) == {"a": 1, "a1": 1}
    scheduler.remove(parent)
    # Found again: the prompt's full block.
    assert step(scheduler) == {"a1": 1, "a2": 3}
    assert family[2].cached_tokens == 0


def test_a_fork_in_a_full_pool_costs_the_choices_their_places_but_not_their_tokens() -> None:
    scheduler = make(num_blocks=2)
    family = fork(scheduler, add(scheduler, "a", 6), 3)
    assert scheduler.pool.available == 0
    schedule = scheduler.schedule()
    # The first needs no copy once the others are gone.
    assert (plan(schedule), schedule.copies) == ({"a": 1}, ())
    assert family[0].block_table == [0, 1]
    finish(scheduler, schedule)
    assert names(scheduler.waiting) == ["a1", "a2"]
    assert [sequence.tokens[-1] for sequence in family[1:]] == [51, 52]
    scheduler.remove(family[0])
    assert step(scheduler) == {"a1": 3}
    assert family[1].num_output == 2


def test_what_equal_choices_say_is_kept_once() -> None:
    scheduler = make()
    family = fork(scheduler, add(scheduler, "a", 6), 2)
    for sequence in family:
        sequence.tokens[-1] = 7
    step(scheduler)
    assert tables(family) == [[0, 2], [0, 1]]
    step(scheduler)
    assert tables(family) == [[0, 2], [0, 2]]
    assert scheduler.pool.used_count == 2
    step(scheduler)
    assert tables(family) == [[0, 2, 1], [0, 2, 3]]


# G04
def test_a_victim_loses_its_copy_with_its_part() -> None:
    """The choices get their tokens first in the step, and copies; then their elder's prompt takes blocks away."""
    scheduler = make(num_blocks=7, token_budget=16)
    old = add(scheduler, "old", 4)
    step(scheduler)
    family = fork(scheduler, add(scheduler, "a", 6), 3)
    assert (old.block_table, tables(family)) == ([0, 1], [[2, 3]] * 3)
    old.tokens += range(500, 508)
    assert scheduler.pool.free_count == 3
    schedule = scheduler.schedule()
    # Two choices copied block 3, to 4 and 5; the third was to write to it. The elder lacks two blocks, one is left. The
    # third gives up its place, but no block by that, for 3 is still to be copied; then the second gives up its copy.
    assert plan(schedule) == {"a": 1, "old": 9}
    assert schedule.copies == ((3, 4),)
    assert (old.block_table, tables(family)) == ([0, 1, 5, 6], [[2, 4], [], []])
    finish(scheduler, schedule)
    assert scheduler.pool.free_count == 1


def test_choices_of_a_private_prompt_stay_private() -> None:
    scheduler = make()
    parent = add(scheduler, "a", 9, first=0)
    add(scheduler, "b", 1)
    (entry, other) = scheduler.schedule().entries
    scheduler.complete(entry)
    scheduler.complete(other)
    other.sequence.tokens.append(7)
    scheduler.pool.forget(parent.block_table)
    parent.private = True
    (child,) = scheduler.fork(parent, [1])
    for sequence in (parent, child):
        sequence.tokens.append(7)
    for _ in range(5):
        step(scheduler)
    assert scheduler.pool.stored == 2 + scheduler.running[-1].num_sealed
    for sequence in (parent, child):
        assert not any(map(scheduler.pool.hash_of, sequence.block_table))


def test_who_has_a_copy_still_to_be_made_can_not_be_forked() -> None:
    scheduler = make()
    parent, _ = fork(scheduler, add(scheduler, "a", 6), 2)
    assert scheduler.schedule().copies == ((1, 2),)
    with pytest.raises(ValueError, match="can't be forked"):
        scheduler.fork(parent, [2])


@pytest.mark.parametrize("when", ["before its prompt is computed", "when it has gone on", "when it has ended"])
def test_a_fork_at_another_time_is_refused(when: str) -> None:
    scheduler = make(token_budget=4)
    parent = add(scheduler, "a", 6)
    step(scheduler)
    if when != "before its prompt is computed":
        step(scheduler)
        step(scheduler)
    if when == "when it has ended":
        scheduler.remove(parent)
        assert parent.status is Status.FINISHED
    with pytest.raises(ValueError, match="can't be forked"):
        scheduler.fork(parent, [1])
