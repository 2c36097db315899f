"""When blocks run out: who gives way, and how often."""

from __future__ import annotations

from tests.unit.worker.scheduling import add, make, names, plan, step
from worker.sequence import Status


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


# G06
def test_recomputes_are_bounded_under_steady_arrivals() -> None:
    """At equal priority only those that ran before a sequence may preempt it, once each."""
    scheduler = make(num_blocks=9, max_running=4, token_budget=16, context_length=36)
    arrived, ended, preempted = 0, [], []
    for _ in range(1500):
        while len(scheduler.waiting) < 3:
            arrived += 1
            add(scheduler, f"{arrived}", 3 + arrived * 5 % 9, first=arrived * 100)
        assert step(scheduler)
        for one in [each for each in scheduler.running if each.num_output >= 8 + each.num_prompt]:
            scheduler.remove(one)
            ended.append(int(one.request.request_id))
            preempted.append(one.preemptions)
    assert len(ended) > 150
    assert sum(preempted) > 100
    assert max(preempted) <= 3
    # They also end nearly in the order in which they came.
    assert max(abs(number - place) for place, number in enumerate(ended, 1)) <= 4
