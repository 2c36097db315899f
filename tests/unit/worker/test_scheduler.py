"""The scheduler: who runs when, on which blocks, and what happens when they run out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import root
from worker.block_pool import BlockPool, IntegrityError
from worker.params import AdmissionError, SamplingParams, StopParams
from worker.scheduler import Schedule, Scheduler
from worker.sequence import Request, Sequence, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

BS = 4


def make(
    num_blocks: int = 16, *, max_running: int = 8, token_budget: int = 32, context_length: int = 1000
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, BS), max_running=max_running, token_budget=token_budget, context_length=context_length
    )


def sequence(name: str, length: int, *, first: int | None = None, salt: str = "") -> Sequence:
    """``length`` prompt tokens counting up from ``first``; by default no two names share a prefix."""
    start = sum(map(ord, name)) * 1000 if first is None else first
    prompt = tuple(range(start, start + length))
    request = Request(name, prompt, SamplingParams(), StopParams(max_tokens=100), salt=salt)
    return Sequence(request, root=root("model", BS, salt), block_size=BS)


def add(scheduler: Scheduler, name: str, length: int, *, first: int | None = None, salt: str = "") -> Sequence:
    made = sequence(name, length, first=first, salt=salt)
    scheduler.add(made)
    return made


def plan(schedule: Schedule) -> dict[str, int]:
    return {entry.sequence.request.request_id: entry.num_tokens for entry in schedule.entries}


def step(scheduler: Scheduler) -> dict[str, int]:
    """One whole step; what caught up gets one more token."""
    schedule = scheduler.schedule()
    for entry in schedule.entries:
        scheduler.complete(entry)
        if entry.sequence.num_uncomputed == 0:
            entry.sequence.tokens.append(7)
    scheduler.check_integrity()
    return plan(schedule)


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [entry.request.request_id for entry in sequences]


def test_a_prompt_and_its_decoding() -> None:
    scheduler = make()
    one = add(scheduler, "a", 5)
    assert step(scheduler) == {"a": 5}
    assert one.block_table == [0, 1]
    assert [step(scheduler) for _ in range(3)] == [{"a": 1}] * 3
    assert one.block_table == [0, 1]
    assert step(scheduler) == {"a": 1}
    assert one.block_table == [0, 1, 2]
    assert (one.num_computed, one.num_tokens, one.num_output) == (9, 10, 5)


def test_admission_is_first_come_first_served_under_the_budget() -> None:
    scheduler = make(token_budget=10)
    for name, length in (("a", 4), ("b", 9), ("c", 2)):
        add(scheduler, name, length)
    assert step(scheduler) == {"a": 4, "b": 6}
    assert step(scheduler) == {"a": 1, "b": 3, "c": 2}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_a_chunk_ends_anywhere() -> None:
    scheduler = make(token_budget=3)
    one = add(scheduler, "a", 8)
    tables = []
    for expected in (3, 3, 2, 1):
        assert step(scheduler) == {"a": expected}
        tables.append(list(one.block_table))
    assert tables == [[0], [0, 1], [0, 1], [0, 1, 2]]


def test_streams_get_their_token_before_anybodys_prompt() -> None:
    scheduler = make(token_budget=8)
    add(scheduler, "short", 2)
    long = add(scheduler, "long", 20)
    add(scheduler, "last", 1)
    assert step(scheduler) == {"short": 2, "long": 6}
    assert step(scheduler) == {"short": 1, "long": 7}
    assert step(scheduler) == {"short": 1, "long": 7}
    assert long.num_output == 1
    long.tokens += range(20)
    assert step(scheduler) == {"short": 1, "long": 7}
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"long": 8}
    assert step(scheduler) == {"long": 6, "last": 1}
    long.tokens += range(20)
    assert list(step(scheduler).items()) == [("last", 1), ("long", 7)]


def test_no_more_run_than_allowed() -> None:
    scheduler = make(max_running=2)
    for name in "abc":
        add(scheduler, name, 3)
    assert step(scheduler) == {"a": 3, "b": 3}
    assert names(scheduler.waiting) == ["c"]
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"b": 1, "c": 3}


def test_no_more_run_than_a_step_has_tokens() -> None:
    scheduler = make(max_running=8, token_budget=2)
    for name in "abc":
        add(scheduler, name, 1)
    assert scheduler.max_running == 2
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"a": 1, "b": 1}


def test_blocks_are_offered_only_after_their_step() -> None:
    scheduler = make()
    add(scheduler, "a", 9, first=0)
    scheduler.schedule()
    twin = add(scheduler, "b", 9, first=0)
    scheduler.schedule()
    assert (twin.cached_tokens, twin.block_table) == (0, [3, 4, 5])


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


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_of_a_fully_cached_prompt_the_last_token_is_computed(length: int, hit: int) -> None:
    scheduler = make()
    first = add(scheduler, "a", length, first=0)
    step(scheduler)
    scheduler.remove(first)
    again = add(scheduler, "b", length, first=0)
    assert step(scheduler) == {"b": length - hit}
    assert again.cached_tokens == hit


def test_a_full_hit_does_not_break_the_chain() -> None:
    scheduler = make()
    for name, length, hit in (("a", 16, 0), ("b", 16, 12), ("c", 20, 16), ("d", 21, 20)):
        made = add(scheduler, name, length, first=0)
        step(scheduler)
        assert made.cached_tokens == hit
        scheduler.remove(made)


def test_output_is_cached_like_a_prompt() -> None:
    scheduler = make()
    one = add(scheduler, "a", 4, first=0)
    for _ in range(6):
        step(scheduler)
    history = tuple(one.tokens)
    assert one.num_computed == 9
    scheduler.remove(one)
    request = Request("b", history, SamplingParams(), StopParams(max_tokens=1))
    two = Sequence(request, root=root("model", BS), block_size=BS)
    scheduler.add(two)
    assert step(scheduler) == {"b": 2}
    assert two.cached_tokens == 8


def test_twins_in_one_step_compute_twice_and_the_second_stays_private() -> None:
    scheduler = make()
    one, two = add(scheduler, "a", 9, first=0), add(scheduler, "b", 9, first=0)
    assert step(scheduler) == {"a": 9, "b": 9}
    assert (one.block_table, two.block_table) == ([0, 1, 2], [3, 4, 5])
    scheduler.remove(two)
    assert (scheduler.pool.free_count, scheduler.pool.cached_count) == (13, 0)
    scheduler.remove(one)
    assert (scheduler.pool.free_count, scheduler.pool.cached_count) == (14, 2)


def test_salts_keep_prefixes_apart() -> None:
    scheduler = make()
    hits = []
    for index, salt in enumerate(("A", "B", "", "A")):
        made = add(scheduler, f"{index}", 9, first=0, salt=salt)
        step(scheduler)
        hits.append(made.cached_tokens)
    assert hits == [0, 0, 0, 8]


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


def test_the_youngest_is_preempted_and_waits_at_the_front() -> None:
    scheduler = make(num_blocks=4)
    old, young = add(scheduler, "old", 7), add(scheduler, "young", 7)
    late = add(scheduler, "late", 1)
    assert step(scheduler) == {"old": 7, "young": 7}
    assert step(scheduler) == {"old": 1, "young": 1}
    assert names(scheduler.waiting) == ["late"]
    assert step(scheduler) == {"old": 1}
    assert names(scheduler.waiting) == ["young", "late"]
    assert (young.status, young.block_table, young.num_computed, young.preemptions) == (Status.WAITING, [], 0, 1)
    assert old.block_table == [0, 1, 3]
    assert scheduler.preemptions == 1
    assert late.status is Status.WAITING


def test_a_preempted_sequence_recomputes_prompt_and_output() -> None:
    scheduler = make(num_blocks=4)
    old, young = add(scheduler, "old", 7), add(scheduler, "young", 7)
    for _ in range(3):
        step(scheduler)
    history = list(young.tokens)
    assert young.num_output == 2
    assert step(scheduler) == {"old": 1}
    scheduler.remove(old)
    # Its first block is still cached, which is its own work and counts as no hit.
    assert step(scheduler) == {"young": 5}
    assert young.tokens[:-1] == history
    assert (young.cached_tokens, scheduler.prefix_queried, scheduler.prefix_hit) == (0, 14, 0)


def test_a_victim_that_has_its_part_already_loses_it() -> None:
    """The youngest decodes first in the step; then its elder's prompt takes the blocks away."""
    scheduler = make(num_blocks=5, token_budget=16)
    old = add(scheduler, "old", 4)
    step(scheduler)
    young = add(scheduler, "young", 12)
    assert step(scheduler) == {"old": 1, "young": 12}
    old.tokens += range(500, 510)
    assert young.num_uncomputed == 1
    assert young.block_table == [2, 3, 4]
    schedule = scheduler.schedule()
    assert plan(schedule) == {"old": 11}
    assert schedule.num_tokens == 11
    assert young.status is Status.WAITING
    for entry in schedule.entries:
        scheduler.complete(entry)
    old.tokens.append(7)
    scheduler.check_integrity()


def test_the_tokens_of_a_victim_go_to_others() -> None:
    scheduler = make(num_blocks=7, token_budget=8)
    old, middle = add(scheduler, "old", 4), add(scheduler, "middle", 3)
    step(scheduler)
    young = add(scheduler, "young", 6)
    assert step(scheduler) == {"old": 1, "middle": 1, "young": 6}
    old.tokens += range(500, 510)
    middle.tokens += range(600, 610)
    assert (scheduler.pool.free_count, young.num_uncomputed) == (2, 1)
    scheduler.pool.allocate(2)  # somebody else's
    schedule = scheduler.schedule()
    assert plan(schedule) == {"old": 7, "middle": 1}
    assert young.status is Status.WAITING


def test_the_last_victim_is_the_sequence_itself() -> None:
    scheduler = make(num_blocks=4, token_budget=16)
    old, young = add(scheduler, "old", 7), add(scheduler, "young", 7)
    step(scheduler)
    old.tokens += range(500, 504)
    assert step(scheduler) == {"old": 5}
    assert young.status is Status.WAITING


def test_the_oldest_is_never_preempted() -> None:
    scheduler = make(num_blocks=4, context_length=16)
    sequences = [add(scheduler, name, 3) for name in "abcd"]
    for _ in range(12):
        assert "a" in step(scheduler)
    assert sequences[0].preemptions == 0
    assert sequences[0].num_output == 12


def test_recomputes_are_bounded_by_what_ends() -> None:
    """A preempted sequence comes back only when another one has ended."""
    scheduler = make(num_blocks=6, context_length=24)
    pending = [add(scheduler, name, 5) for name in "abcdef"]
    everybody = list(pending)
    for _ in range(300):
        if not (scheduler.running or scheduler.waiting):
            break
        step(scheduler)
        for one in [s for s in scheduler.running if s.num_tokens >= 20]:
            scheduler.remove(one)
    assert [one.status for one in everybody] == [Status.FINISHED] * 6
    assert max(one.preemptions for one in everybody) <= 5


def test_nobody_overtakes_a_preempted_sequence() -> None:
    scheduler = make(num_blocks=6, token_budget=64)
    old = add(scheduler, "old", 8)
    young = add(scheduler, "young", 9)
    step(scheduler)
    old.tokens += range(500, 507)
    add(scheduler, "small", 1)
    assert step(scheduler) == {"old": 8}
    assert names(scheduler.waiting) == ["young", "small"]
    assert scheduler.pool.available == 2
    scheduler.remove(young)
    assert step(scheduler) == {"old": 1, "small": 1}


def test_a_prompt_is_not_started_without_room_for_all_of_it() -> None:
    scheduler = make(num_blocks=6, token_budget=4)
    add(scheduler, "a", 16)
    assert step(scheduler) == {"a": 4}
    add(scheduler, "b", 9)
    assert [step(scheduler) for _ in range(4)] == [{"a": 4}, {"a": 4}, {"a": 4}, {"a": 1}]
    assert scheduler.preemptions == 0
    assert names(scheduler.waiting) == ["b"]


def test_blocks_that_are_in_use_anyway_need_no_room() -> None:
    scheduler = make(num_blocks=5)
    add(scheduler, "a", 13, first=0)
    step(scheduler)
    assert scheduler.pool.available == 1
    add(scheduler, "b", 12, first=0)
    add(scheduler, "c", 1)
    assert step(scheduler) == {"a": 1, "b": 4}
    assert scheduler.pool.available == 0
    assert names(scheduler.waiting) == ["c"]


@pytest.mark.parametrize(("num_blocks", "model_context", "effective"), [(4, 1000, 16), (4, 16, 16), (4, 15, 15)])
def test_a_prompt_that_can_never_fit_is_refused_with_the_effective_limit(
    num_blocks: int, model_context: int, effective: int
) -> None:
    scheduler = make(num_blocks, context_length=model_context)
    assert scheduler.context_length == effective
    add(scheduler, "fits", effective - 1)
    assert step(scheduler) == {"fits": effective - 1}
    for length in (effective, effective + 1, 4 * effective):
        with pytest.raises(AdmissionError, match=f"has {length} tokens; at most {effective - 1} fit") as refused:
            add(scheduler, "too long", length)
        assert refused.value.limit == effective - 1
    assert not scheduler.waiting


def test_a_sequence_alone_fills_the_whole_pool() -> None:
    scheduler = make(num_blocks=4)
    one = add(scheduler, "a", 1)
    while one.num_tokens < scheduler.context_length:
        assert step(scheduler) == {"a": 1}
    assert one.preemptions == 0
    assert one.block_table == [0, 1, 2, 3]


def test_removing_a_waiting_a_running_and_a_half_computed_sequence() -> None:
    scheduler = make(token_budget=4, max_running=2)
    done, half, queued = add(scheduler, "a", 2), add(scheduler, "b", 9), add(scheduler, "c", 3)
    step(scheduler)
    assert half.num_computed == 2
    for one in (queued, half, done):
        scheduler.remove(one)
        scheduler.check_integrity()
        assert one.status is Status.FINISHED
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.used_count == 0
    assert scheduler.schedule().entries == ()


def test_a_preempted_sequence_can_be_removed() -> None:
    scheduler = make(num_blocks=4)
    add(scheduler, "old", 7)
    young = add(scheduler, "young", 7)
    for _ in range(3):
        step(scheduler)
    assert young.status is Status.WAITING
    scheduler.remove(young)
    scheduler.check_integrity()
    assert not scheduler.waiting


def test_integrity_notices_a_table_that_does_not_fit() -> None:
    scheduler = make()
    one = add(scheduler, "a", 5)
    step(scheduler)
    one.num_computed = 4
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()


def test_integrity_notices_a_block_offered_as_something_else() -> None:
    scheduler = make()
    one = add(scheduler, "a", 9)
    step(scheduler)
    one.block_table[0], one.block_table[1] = one.block_table[1], one.block_table[0]
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()


@pytest.mark.parametrize("wrong", [{"max_running": 0}, {"token_budget": 0}, {"context_length": 1}])
def test_limits_that_let_nothing_run_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        make(**wrong)
