"""What a token log says that a job has said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo.v1 import inference_pb2, job_pb2
from worker.past import Gathered, Past, PastLost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOBODY: frozenset[int] = frozenset()


def past_of(
    log: Sequence[job_pb2.Delivery], choices: int, *, known: Mapping[int, int], ended: frozenset[int] | None
) -> Past:
    """Whatever pages the log comes in."""
    pasts: list[Past | str] = []
    for size in (1, 2, max(len(log), 1)):
        gathered = Gathered(choices)
        for at in range(0, len(log), size):
            gathered.add(log[at : at + size])
        try:
            pasts.append(gathered.past(known=known, ended=ended))
        except PastLost as lost:
            pasts.append(str(lost))
    assert pasts == pasts[:1] * 3
    if isinstance(pasts[0], str):
        raise PastLost(pasts[0])
    return pasts[0]


def chunk(choice: int, start: int, *tokens: int, finish: bool = False, attempt: int = 1) -> job_pb2.Delivery:
    end = inference_pb2.STOP if finish else None
    made = inference_pb2.Chunk(choice=choice, start=start, token_ids=tokens, finish=end)
    return job_pb2.Delivery(request_id="r", attempt=attempt, chunk=made)


LOG = [
    chunk(0, 0, 10),
    chunk(1, 0, 20),
    chunk(1, 1, 21, finish=True),
    chunk(0, 1, 11, 12, attempt=2),
    chunk(0, 3, 13, attempt=3),
]


def test_a_log_is_joined_by_choice_whatever_the_attempts() -> None:
    past = past_of(LOG, 3, known={0: 4, 1: 2, 2: 0}, ended=frozenset({1}))
    assert past == Past({0: (10, 11, 12, 13), 1: (20, 21), 2: ()}, frozenset({1}))
    assert past.longest == (10, 11, 12, 13)


def test_without_other_knowledge_the_log_says_how_far_it_goes_and_who_has_ended() -> None:
    assert past_of(LOG, 3, known={}, ended=None) == Past({0: (10, 11, 12, 13), 1: (20, 21), 2: ()}, frozenset({1}))
    assert past_of([], 2, known={0: 0}, ended=None) == Past({0: (), 1: ()}, NOBODY)


def test_what_is_not_committed_counts_for_nothing() -> None:
    assert past_of(LOG, 2, known={0: 2, 1: 1}, ended=NOBODY).said == {0: (10, 11), 1: (20,)}


@pytest.mark.parametrize("known", [{0: 5}, {1: 3}, {2: 1}, {3: 1}])
def test_a_log_that_lacks_something_is_no_past(known: dict[int, int]) -> None:
    with pytest.raises(PastLost, match="the broker lost a part of this job's output"):
        past_of(LOG, 3, known=known, ended=NOBODY)


def test_what_lies_behind_a_hole_is_not_said() -> None:
    torn = [LOG[0], LOG[4]]
    assert past_of(torn, 1, known={0: 1}, ended=NOBODY).said == {0: (10,)}
    assert past_of([LOG[2]], 2, known={}, ended=None) == Past({0: (), 1: ()}, NOBODY)
    with pytest.raises(PastLost):
        past_of(torn, 1, known={0: 4}, ended=NOBODY)


def test_what_is_there_twice_is_said_once() -> None:
    again = [*LOG, chunk(0, 2, 12, 13, 14, attempt=4)]
    assert past_of(again, 1, known={}, ended=NOBODY).said == {0: (10, 11, 12, 13, 14)}


def test_what_no_worker_has_written_is_passed_over() -> None:
    """An end from outside, and a choice that the job has not."""
    assert past_of([chunk(0, 0, 9, finish=True, attempt=0), chunk(7, 0, 1)], 1, known={}, ended=None) == Past(
        {0: ()}, NOBODY
    )


def test_the_longest_is_of_a_choice_that_goes_on() -> None:
    assert Past({0: (1, 2, 3), 1: (4,), 2: (5, 6)}, frozenset({0})).longest == (5, 6)
    assert Past({0: (1,)}, frozenset({0})).longest == ()
    assert [bool(past) for past in (Past({0: ()}, NOBODY), Past({0: (1,)}, NOBODY), Past({}, frozenset({0})))] == [
        False,
        True,
        True,
    ]
