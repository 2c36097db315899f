"""A reader's place in the output of a job with several choices."""

from __future__ import annotations

import pytest

from gateway.errors import JobLost
from gateway.place import Offer, Place, well_formed
from octavo.v1.inference_pb2 import CANCELLED, ERROR, LENGTH, STOP, Usage
from octavo.v1.job_pb2 import FAILURE_UNAVAILABLE
from tests.unit.gateway.deliveries import chunk, outside, places


@pytest.fixture
def three() -> Place:
    """Of a job with three choices."""
    return Place(choices=3, capacity=100)


def test_a_job_that_runs_again_is_gone_on_with(three: Place) -> None:
    """From its first token, and in another order: what is had of it comes no second time, nor does the route."""
    three.refill([chunk(0, 2), chunk(0, choice=1), chunk(1, 0, STOP, choice=1, used=3)])
    had = three.take(10)
    three.restart()
    assert three.stale
    three.stale = False
    first = chunk(0, choice=2)
    first.route.worker = "w1"
    again = [first, chunk(0), chunk(1), chunk(0, choice=1), chunk(1, 0, STOP, choice=1, used=3), chunk(2, 1, STOP)]
    assert three.refill(again[:4]) == 0
    assert [three.offer(each) for each in again[4:]] == [Offer.SEEN, Offer.TAKEN]
    assert places(had) == [(0, 0, 0), (1, 0, 0), (1, 1, STOP)]
    more = three.take(10)
    assert places(more) == [(2, 0, 0), (0, 2, STOP)]
    assert not any(each.HasField("route") for each in more)
    assert first.HasField("route")
    assert three.open == {2}


def test_the_first_delivery_of_a_job_brings_its_route(three: Place) -> None:
    """Without one, something was lost before it: the reader gets the route with the first output in any case."""
    assert three.offer(chunk(0, choice=1)) is Offer.LOG
    three.stale = False
    three.refill([chunk(0), chunk(0, choice=1)])
    assert three.offer(chunk(0, choice=2)) is Offer.TAKEN
    assert [each.HasField("route") for each in three.take(10)] == [True, False, False]


def test_choices_go_on_each_at_its_own_pace(three: Place) -> None:
    steps = [chunk(0), chunk(0, 2, choice=1), chunk(0, choice=2), chunk(2, choice=1), chunk(1, choice=2), chunk(1)]
    assert [three.offer(each) for each in steps] == [Offer.TAKEN] * 6
    assert (three.next, three.open) == ([2, 3, 2], {0, 1, 2})
    assert three.offer(chunk(1, choice=1)) is Offer.SEEN
    assert three.take(10) == steps


def test_a_choice_that_ends_leaves_the_others_open(three: Place) -> None:
    ends = [chunk(0, 2, STOP), chunk(0, 0, LENGTH, choice=2, used=5), chunk(0, 3, STOP, choice=1, used=5)]
    for number, end in enumerate(ends):
        assert not three.ended
        assert three.offer(end) is Offer.TAKEN
        assert three.offer(end) is Offer.SEEN
        assert three.offer(chunk(9, choice=end.chunk.choice)) is Offer.SEEN
        assert len(three.open) == 2 - number
    assert three.ended
    assert three.take(10) == ends


def test_a_gap_in_one_choice_is_filled_for_all(three: Place) -> None:
    log = [chunk(0), chunk(0, choice=1), chunk(1), chunk(0, choice=2), chunk(2), chunk(1, choice=1)]
    assert three.offer(log[0]) is Offer.TAKEN
    assert three.offer(log[1]) is Offer.TAKEN
    assert three.offer(log[4]) is Offer.LOG
    # Of the others too, what comes meanwhile is left to the log.
    assert three.offer(log[3]) is Offer.LOG
    three.stale = False
    assert three.refill(log) == 0
    assert (three.next, three.take(10)) == ([3, 2, 1], log)
    with pytest.raises(JobLost, match="of choice 2 goes from index 1 to 3"):
        three.refill([chunk(1, choice=1), chunk(3, choice=2)])


def test_an_end_from_outside_ends_each_open_choice_once(three: Place) -> None:
    log = [chunk(0, 2), chunk(0, choice=1), chunk(1, 0, STOP, choice=1, used=3), chunk(0, 3, choice=2), outside()]
    for each in log[:-1]:
        three.offer(each)
    assert three.offer(outside()) is Offer.LOG
    three.stale = False
    three.refill(log)
    assert three.open == {0, 2}
    three.complete({0: 2, 1: 1, 2: 3}, Usage(completion_tokens=6))
    assert places(three.take(10)[-2:]) == [(0, 2, CANCELLED), (2, 3, CANCELLED)]
    assert (three.ended, three.usage.completion_tokens) == (True, 6)


def test_an_end_from_outside_before_anything_was_said(three: Place) -> None:
    three.refill([outside(ERROR)])
    three.complete({0: 0, 1: 0, 2: 0}, Usage(prompt_tokens=4))
    ends = three.take(10)
    assert places(ends) == [(choice, 0, ERROR) for choice in range(3)]
    assert {(each.chunk.error, each.failure) for each in ends} == {("why", FAILURE_UNAVAILABLE)}
    assert three.usage == Usage(prompt_tokens=4)


def test_usage_is_what_all_have_used_in_whatever_order_the_ends_come(three: Place) -> None:
    """The end of choice 0 was lost at first, and comes from the log behind the later ones."""
    log = [
        chunk(0),
        chunk(1, 1, STOP, used=3),
        chunk(0, 4, STOP, choice=1, used=6),
        chunk(0, 7, STOP, choice=2, used=13),
    ]
    for each in (log[0], log[2], log[3]):
        assert three.offer(each) is Offer.TAKEN
    assert not three.ended
    three.refill(log)
    assert places(three.take(10)) == [(0, 0, 0), (1, 0, STOP), (2, 0, STOP), (0, 1, STOP)]
    assert (three.ended, three.usage.completion_tokens) == (True, 13)


def test_a_reader_is_behind_when_tokens_or_ends_are_missing(three: Place) -> None:
    three.refill([chunk(0, 2), chunk(0, choice=1), chunk(1, 0, STOP, choice=1)])
    assert not three.behind({0: 2, 1: 1, 2: 0}, {1})
    assert three.behind({0: 2, 1: 1, 2: 1}, {1})
    assert three.behind({0: 2, 1: 1, 2: 0}, {0, 1})


def test_choices_that_the_job_does_not_have(three: Place) -> None:
    assert well_formed(chunk(0, choice=2), 3)
    for choice in (3, 31, 2**32 - 1):
        assert three.offer(chunk(0, 1, STOP, choice=choice)) is Offer.MALFORMED
    assert three.refill([chunk(0, choice=3), chunk(0)]) == 1
    assert three.next == [1, 0, 0]
