"""The scheduler: who runs when, with how many tokens."""

from __future__ import annotations

import pytest

from tests.unit.worker.scheduling import add, make, names, step
from worker.block_pool import IntegrityError
from worker.params import AdmissionError
from worker.sequence import Status


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


def test_a_prompt_is_not_started_without_room_for_all_of_it() -> None:
    scheduler = make(num_blocks=6, token_budget=4)
    add(scheduler, "a", 16)
    assert step(scheduler) == {"a": 4}
    add(scheduler, "b", 9)
    assert [step(scheduler) for _ in range(4)] == [{"a": 4}, {"a": 4}, {"a": 4}, {"a": 1}]
    assert scheduler.preemptions == 0
    assert names(scheduler.waiting) == ["b"]


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
