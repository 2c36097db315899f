"""Who is let in, and when."""

from __future__ import annotations

import pytest

from tests.unit.worker.scheduling import add, make, names, step
from worker.params import AdmissionError
from worker.sequence import Status


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


# G11
def test_sequences_that_never_ran_can_be_removed() -> None:
    scheduler = make(max_running=2)
    running = [add(scheduler, name, 9, first=0) for name in "ab"]
    step(scheduler)
    queued = [add(scheduler, f"q{index}", 9, first=0) for index in range(20)]
    step(scheduler)
    for sequence in (*queued[::2], *queued[1::2]):
        scheduler.remove(sequence)
        scheduler.check_integrity()
    assert len(scheduler.waiting) == 0
    assert {sequence.status for sequence in queued} == {Status.FINISHED}
    assert [*scheduler.running] == running
    assert step(scheduler) == {"a": 1, "b": 1}


# The first of the line, when it has no room, is not looked at in every step. But nothing that makes room is missed.


def test_a_blocked_sequence_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(num_blocks=6)
    for name in "ab":
        add(scheduler, name, 9)
    step(scheduler)
    add(scheduler, "blocked", 9)
    looked_up = []
    match = scheduler.pool.match
    monkeypatch.setattr(scheduler.pool, "match", lambda *given: looked_up.append(given) or match(*given))
    assert [step(scheduler) for _ in range(2)] == [{"a": 1, "b": 1}] * 2
    assert len(looked_up) == 1
    scheduler.remove(scheduler.running[1])
    assert step(scheduler) == {"a": 1, "blocked": 9}


def test_a_blocked_sequence_comes_in_when_another_one_has_ended() -> None:
    scheduler = make(num_blocks=6)
    one, two = add(scheduler, "a", 9, first=0), add(scheduler, "b", 9)
    step(scheduler)
    blocked = add(scheduler, "c", 9, first=0, salt="s")
    assert [step(scheduler) for _ in range(2)] == [{"a": 1, "b": 1}] * 2
    scheduler.remove(two)
    assert step(scheduler) == {"a": 1, "c": 9}
    scheduler.remove(blocked)
    add(scheduler, "d", 20)
    assert step(scheduler) == {"a": 1}
    # What is known now needs no room.
    scheduler.remove(scheduler.waiting[0])
    add(scheduler, "e", 13, first=0)
    assert step(scheduler) == {"a": 1, "e": 5}
    assert one.num_output == 6


def test_a_blocked_sequence_comes_in_when_blocks_turn_out_to_be_superfluous() -> None:
    scheduler = make(num_blocks=7)
    add(scheduler, "a", 9, first=0)
    step(scheduler)
    add(scheduler, "scored", 9, first=0, scored=True)
    add(scheduler, "blocked", 9)
    assert step(scheduler) == {"a": 1, "scored": 9}
    # What was computed again for its logits was known.
    assert step(scheduler) == {"a": 1, "scored": 1, "blocked": 9}
