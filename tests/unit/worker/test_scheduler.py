"""The scheduler: who runs when, with how many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.scheduling import add, make, names, step
from worker.scheduling.block import IntegrityError
from worker.sequence import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.scheduling.scheduler import Scheduler


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
        assert (one.status, one.block_table, one.num_computed) == (Status.FINISHED, [], 0)
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.used_count == 0
    assert scheduler.schedule().entries == ()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda scheduler: setattr(scheduler.running[0], "num_computed", 4), "doesn't fit"),
        (lambda scheduler: scheduler.running[0].block_table.reverse(), "offered as something else"),
        (lambda scheduler: setattr(scheduler.running[0], "num_sealed", 1), "offered as something else"),
        (lambda scheduler: setattr(scheduler.running[0], "num_sealed", 3), "has offered 3 blocks"),
        (lambda scheduler: setattr(scheduler.running[0], "status", Status.WAITING), "can't run"),
        (lambda scheduler: scheduler.running[0].tokens.pop(), "can't run"),
        (lambda scheduler: setattr(scheduler.running[0], "copy", (4, 2)), "tables name"),
        (lambda scheduler: scheduler.pool.share([0]), "tables name"),
        (lambda scheduler: setattr(scheduler.running[1], "announced", 2), "what is announced"),
        (lambda scheduler: setattr(scheduler.waiting[0], "num_computed", 1), "holds something while it waits"),
        (lambda scheduler: setattr(scheduler.waiting[0], "status", Status.RUNNING), "holds something while it waits"),
        (lambda scheduler: setattr(scheduler.running[1], "standing", (-1, 0, 0)), "out of order"),
        (lambda scheduler: setattr(scheduler.waiting[0], "standing", (9, 9, 9)), "out of order"),
        (lambda scheduler: setattr(scheduler, "max_running", 1), "at most 1 may"),
    ],
)
def test_integrity_notices_what_contradicts_itself(fault: Callable[[Scheduler], object], message: str) -> None:
    scheduler = make(token_budget=18, max_running=2)
    add(scheduler, "a", 9)
    add(scheduler, "long", 17)
    add(scheduler, "b", 1)
    add(scheduler, "c", 1)
    assert step(scheduler) == {"a": 9, "long": 9}
    fault(scheduler)
    with pytest.raises(IntegrityError, match=message):
        scheduler.check_integrity()


def test_a_sequence_that_is_not_in_its_line_is_noticed() -> None:
    scheduler = make()
    one = add(scheduler, "a", 1)
    add(scheduler, "b", 1)
    assert one in scheduler.waiting
    scheduler.waiting.remove(one)
    assert one not in scheduler.waiting
    with pytest.raises(IntegrityError, match="not in its line"):
        scheduler.remove(one)


def test_the_least_that_works() -> None:
    scheduler = make(1, max_running=1, token_budget=1, context_length=2, chunk_tokens=1, logit_rows=1)
    add(scheduler, "a", 1)
    assert [step(scheduler) for _ in range(3)] == [{"a": 1}] * 3


@pytest.mark.parametrize(
    "wrong", [{"max_running": 0}, {"token_budget": 0}, {"context_length": 1}, {"chunk_tokens": 0}, {"logit_rows": 0}]
)
def test_limits_that_let_nothing_run_are_refused(wrong: dict[str, int]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be at least {value + 1}"):
        make(**wrong)


# G08
def test_beside_streams_prompts_get_a_chunk_in_all() -> None:
    """However many prompts wait, a step has no more tokens than streams and this chunk; and each prompt gets on."""
    scheduler = make(num_blocks=64, token_budget=32, chunk_tokens=6)
    stream = add(scheduler, "stream", 4)
    assert step(scheduler) == {"stream": 4}
    add(scheduler, "long", 40)
    add(scheduler, "second", 8)
    assert [step(scheduler) for _ in range(6)] == [{"stream": 1, "long": 6}] * 6
    assert step(scheduler) == {"stream": 1, "long": 4, "second": 2}
    assert step(scheduler) == {"stream": 1, "long": 1, "second": 6}
    assert stream.num_output == 9
    for running in [*scheduler.running]:
        scheduler.remove(running)
    # Without streams nobody waits for the step: it may be as long as the budget allows.
    add(scheduler, "alone", 31)
    assert step(scheduler) == {"alone": 31}


def test_a_chunk_may_be_one_token() -> None:
    scheduler = make(chunk_tokens=1)
    add(scheduler, "stream", 4)
    step(scheduler)
    late = add(scheduler, "late", 3)
    assert [step(scheduler) for _ in range(3)] == [{"stream": 1, "late": 1}] * 3
    assert late.num_output == 1


# G05
def test_each_stream_gets_its_token_though_one_before_it_loses_its_place() -> None:
    scheduler = make(num_blocks=10, token_budget=16)
    for name, priority in (("a", 2), ("b", -1), ("c", 1), ("d", 0)):
        add(scheduler, name, 4, priority=priority)
    assert step(scheduler) == {"a": 4, "c": 4, "d": 4, "b": 4}
    assert step(scheduler) == {"a": 1, "c": 1, "d": 1, "b": 1}
    scheduler.running[0].tokens += range(500, 512)
    # Now "a" lacks 13 tokens, and three blocks for them; two are free.
    assert step(scheduler) == {"c": 1, "d": 1, "a": 13}
    assert step(scheduler) == {"a": 1, "c": 1, "d": 1}


# G10
def test_a_short_and_a_long_sequence_give_each_block_back_once() -> None:
    scheduler = make(num_blocks=12)
    short, long = add(scheduler, "short", 5, first=0), add(scheduler, "long", 21, first=0)
    step(scheduler)
    step(scheduler)
    assert long.block_table[0] == short.block_table[0]
    for sequence in (short, long, short, long):
        scheduler.remove(sequence)
        scheduler.check_integrity()
    pool = scheduler.pool
    assert (pool.free_count, pool.cached_count, pool.used_count) == (7, 5, 0)
