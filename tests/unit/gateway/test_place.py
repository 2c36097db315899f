"""A reader's place in a job's output, from deliveries in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import JobLost
from gateway.place import Delivery, Offer, Place, is_terminal, well_formed, written_outside
from octavo.v1.inference_pb2 import CANCELLED, ERROR, LENGTH, STOP, Chunk, Usage
from octavo.v1.job_pb2 import FAILURE_UNAVAILABLE
from tests.unit.gateway.deliveries import chunk, outside, places, starts, written


@pytest.fixture
def place() -> Place:
    """Of a job with one choice."""
    return Place(choices=1, capacity=4)


def test_consecutive_deliveries_come_out_in_order(place: Place) -> None:
    assert [place.offer(each) for each in (chunk(0, 3), chunk(3), chunk(4, 2, STOP))] == [Offer.TAKEN] * 3
    assert (place.ended, place.stale, place.next) == (True, False, [6])
    assert starts(place.take(2)) == [0, 3]
    assert starts(place.take(10)) == [4]
    assert place.take(10) == []


def test_a_repeat_is_not_taken_twice(place: Place) -> None:
    place.offer(chunk(0, 3))
    assert place.offer(chunk(0, 3)) is Offer.SEEN
    assert place.offer(chunk(1)) is Offer.SEEN
    assert len(place) == 1


def test_a_gap_waits_for_the_log(place: Place) -> None:
    place.offer(chunk(0))
    assert place.offer(chunk(2)) is Offer.LOG
    assert (place.stale, place.next) == (True, [1])
    # While the log is to be read, nothing more is taken from the doorbell: the log has it.
    assert place.offer(chunk(1)) is Offer.LOG
    place.stale = False
    assert place.refill([chunk(0), chunk(1), chunk(2), chunk(3, 1, LENGTH)]) == 0
    assert starts(place.take(10)) == [0, 1, 2, 3]
    assert place.ended


def test_a_slow_reader_is_served_from_the_log(place: Place) -> None:
    outcomes = [place.offer(chunk(start)) for start in range(8)]
    assert outcomes == [Offer.TAKEN] * 4 + [Offer.LOG] * 4
    assert len(place) == 4
    assert starts(place.take(10)) == [0, 1, 2, 3]
    place.stale = False
    place.refill(chunk(start) for start in range(8))
    assert starts(place.take(10)) == [4, 5, 6, 7]


def test_a_terminal_without_tokens_ends_the_stream_once(place: Place) -> None:
    place.offer(chunk(0))
    assert place.offer(chunk(1, 0, STOP)) is Offer.TAKEN
    assert place.offer(chunk(1, 0, STOP)) is Offer.SEEN
    assert place.refill([chunk(0), chunk(1, 0, STOP)]) == 0
    assert starts(place.take(10)) == [0, 1]


def test_an_end_from_outside_waits_for_the_log_and_is_completed(place: Place) -> None:
    place.offer(chunk(0))
    assert place.offer(outside()) is Offer.LOG
    assert (place.stale, place.ended) == (True, False)
    place.stale = False
    place.refill([chunk(0), chunk(1, 2), outside()])
    assert not place.ended
    place.complete({0: 3}, Usage(prompt_tokens=5, completion_tokens=3))
    last = place.take(10)[-1]
    assert (last.chunk.start, last.chunk.finish, last.chunk.error) == (3, CANCELLED, "why")
    assert (place.usage.prompt_tokens, place.usage.completion_tokens, last.failure) == (5, 3, FAILURE_UNAVAILABLE)
    assert place.ended
    assert place.offer(outside()) is Offer.SEEN


def test_nothing_after_the_end_is_taken(place: Place) -> None:
    place.refill([outside(ERROR), chunk(0)])
    place.complete({0: 0}, Usage())
    assert place.refill([chunk(0)]) == 0
    assert place.offer(chunk(0)) is Offer.SEEN
    assert starts(place.take(10)) == [0]


def test_a_log_with_a_hole_is_a_lost_job(place: Place) -> None:
    with pytest.raises(JobLost, match="of choice 0 goes from index 1 to 2"):
        place.refill([chunk(0), chunk(2)])


def test_a_log_shorter_than_its_job_is_a_lost_job(place: Place) -> None:
    place.refill([chunk(0), outside()])
    with pytest.raises(JobLost, match=r"the choices of the job have \[3\] tokens and its token log \[1\]"):
        place.complete({0: 3}, Usage())


def test_an_end_of_a_log_that_lacks_what_was_read_comes_behind_it(place: Place) -> None:
    """The broker has lost its last second, and the job was ended before it got as far again."""
    place.refill([chunk(0), chunk(1, 2)])
    place.refill([outside()])
    place.complete({0: 1}, Usage(completion_tokens=1))
    assert places(place.take(10))[-1] == (0, 3, CANCELLED)
    assert place.ended


def test_a_job_that_has_ended_for_its_reader_needs_no_other_life(place: Place) -> None:
    place.refill([chunk(0, 1, STOP)])
    place.restart()
    assert not place.stale


def test_kinds_of_ends() -> None:
    assert (is_terminal(chunk(0)), is_terminal(chunk(0, 1, STOP)), is_terminal(outside())) == (False, True, True)
    assert (written_outside(chunk(0, 1, STOP)), written_outside(outside())) == (False, True)


def test_complete_needs_an_end(place: Place) -> None:
    place.complete({0: 0}, Usage())
    assert (place.ended, len(place)) == (False, 0)


@pytest.mark.parametrize(
    "hostile",
    [
        Delivery(),
        Delivery(chunk=Chunk(start=0, text="no tokens and no end")),
        Delivery(chunk=Chunk(choice=1, token_ids=[1])),
        Delivery(chunk=Chunk(choice=2**32 - 1, finish=STOP)),
    ],
)
def test_what_no_worker_writes_is_dropped(place: Place, hostile: Delivery) -> None:
    assert not well_formed(hostile, 1)
    assert place.offer(hostile) is Offer.MALFORMED
    assert (place.stale, place.next, len(place)) == (False, [0], 0)
    assert place.refill([hostile, chunk(0), hostile, chunk(1, 1, STOP), hostile]) == 2
    assert starts(place.take(10)) == [0, 1]


@given(data=st.data(), choices=st.lists(st.lists(st.integers(1, 3), max_size=8), min_size=1, max_size=4))
def test_whatever_the_doorbell_loses_repeats_or_delays_the_reader_gets_it_all_once(
    data: st.DataObject, choices: list[list[int]]
) -> None:
    total = sum(map(len, choices)) + len(choices)
    log = written(choices, data.draw(st.lists(st.integers(0, 11), min_size=total, max_size=total)))
    log = log[: data.draw(st.just(len(log)) | st.integers(0, len(log)))]
    place, got = Place(choices=len(choices), capacity=3), list[Delivery]()
    for count, delivery in enumerate(log, start=1):
        for _ in range(data.draw(st.integers(0, 2))):
            place.offer(delivery)
        if data.draw(st.booleans()):
            got += place.take(data.draw(st.integers(1, 4)))
        if data.draw(st.booleans()):
            place.stale = False
            place.refill(log[:count])
    place.stale = False
    place.refill([*log, outside()])
    ended = {each.chunk.choice for each in log if each.chunk.finish}
    tokens = dict.fromkeys(range(len(choices)), 0)
    for each in log:
        tokens[each.chunk.choice] += len(each.chunk.token_ids)
    place.complete(tokens, Usage(completion_tokens=sum(tokens.values())))
    got += place.take(100)
    for choice in range(len(choices)):
        mine = [each for each in got if each.chunk.choice == choice]
        if choice not in ended:
            last = mine.pop().chunk
            assert (last.start, last.finish) == (tokens[choice], CANCELLED)
        assert mine == [each for each in log if each.chunk.choice == choice]
    assert [each.HasField("route") for each in got if each in log] == [True, *[False] * (len(log) - 1)][: len(log)]
    assert place.ended
    assert place.usage.completion_tokens == sum(tokens.values())
