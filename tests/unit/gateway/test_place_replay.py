"""Jobs that run again: their tokens are compared with those that their reader has, and two answers never become one."""

from __future__ import annotations

import pytest

from gateway.errors import JobDiffers, JobLost
from gateway.place import Delivery, Offer, Place
from octavo.v1.inference_pb2 import ERROR, LENGTH, STOP, Chunk


def of(ids: list[int], start: int = 0, finish: int = 0, choice: int = 0) -> Delivery:
    """A worker's delivery of these tokens: with the route when it is the job's first, with usage at the end."""
    delivery = Delivery(chunk=Chunk(choice=choice, start=start, token_ids=ids, finish=finish))
    if start == choice == 0:
        delivery.route.worker = "w0"
    if finish:
        delivery.usage.completion_tokens = start + len(ids)
    return delivery


@pytest.mark.parametrize(
    "again",
    [
        [of([5, 6, 7])],
        [of([5]), of([6], 1), of([7], 2)],
        [of([5, 6, 7, 8, 9])],
        [of([5]), of([6, 7, 8], 1)],
        [of([5, 6, 7, 8], finish=STOP)],
    ],
)
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_what_runs_again_with_other_tokens_is_not_gone_on_with(again: list[Delivery], wrong: int) -> None:
    """However its chunks are cut. The other choice is the same, and is no excuse."""
    place = Place(choices=2, capacity=10)
    place.refill([of([5, 6]), of([7], 2), of([4], choice=1)])
    had = place.take(10)
    other = [Delivery.FromString(each.SerializeToString()) for each in again]
    for each in other:
        if 0 <= (index := wrong - each.chunk.start) < len(each.chunk.token_ids):
            each.chunk.token_ids[index] = 2**32 - 1
    place.restart()
    place.stale = False
    with pytest.raises(JobDiffers, match="choice 0 of the job was run anew, and gave another answer"):
        place.refill([of([4], choice=1), *other])
    assert (place.take(10), place.next, len(had)) == ([], [3, 1], 3)
    place.restart()
    place.refill([of([4], choice=1), *again])
    assert place.next == [max(3, again[-1].chunk.start + len(again[-1].chunk.token_ids)), 1]


@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_an_answer_that_ends_before_what_its_reader_has_is_another_one(finish: int) -> None:
    place = Place(choices=1, capacity=10, after={0: 7})
    with pytest.raises(JobDiffers):
        place.refill([of([1, 2]), of([3], 2, finish)])
    failed = Place(choices=1, capacity=10, after={0: 7})
    failed.refill([of([1, 2]), of([3], 2, ERROR)])
    assert [(each.chunk.start, each.chunk.finish) for each in failed.take(10)] == [(7, ERROR)]


def test_of_a_reader_that_began_elsewhere_only_what_it_got_here_is_compared() -> None:
    place = Place(choices=1, capacity=10, after={0: 2})
    place.refill([of([5, 6, 7])])
    place.restart()
    assert place.refill([of([8]), of([9, 7], 1)]) == 0
    with pytest.raises(JobDiffers):
        place.refill([of([6, 8], 1)])


def test_a_late_message_of_another_life_is_left_to_the_log() -> None:
    """It is no reason to fail: the log has what the job has said in this one."""
    place = Place(choices=1, capacity=10)
    place.refill([of([5, 6])])
    assert place.offer(of([6, 9], 0)) is Offer.LOG
    assert (place.stale, place.next) == (True, [2])
    place.stale = False
    assert place.refill([of([5, 6]), of([7], 2)]) == 0
    assert [each.chunk.start for each in place.take(10)] == [0, 2]


def test_what_runs_again_is_gone_on_with_only_once_all_of_it_has_been_compared() -> None:
    place = Place(choices=1, capacity=10)
    place.refill([of([5]), of([6], 1)])
    place.take(10)
    place.restart()
    place.stale = False
    assert place.offer(of([7], 2)) is Offer.LOG  # the next for the reader, but what came before was not heard
    place.stale = False
    with pytest.raises(JobLost, match="of choice 0 goes from index 0 to 1"):
        place.refill([of([6], 1)])
    assert place.refill([of([5]), of([6], 1)]) == 0
    assert place.offer(of([7], 2)) is Offer.TAKEN


@pytest.mark.parametrize("rung", [True, False])
def test_who_began_each_life_is_known_and_its_reader_is_told_of_the_first(rung: bool) -> None:
    """Also where the life has said nothing yet that is new, or its first delivery is of a choice that has ended."""

    def heard(place: Place, delivery: Delivery) -> None:
        if rung:
            place.offer(delivery)
        else:
            place.refill([delivery])

    place = Place(choices=2, capacity=10)
    assert place.route is None
    heard(place, of([5, 6], finish=STOP))
    assert place.route is not None
    assert place.route.worker == "w0"
    (first,) = place.take(10)
    assert first.HasField("route")
    place.restart()
    assert place.route is None
    place.offer(of([5, 6]))  # of which life, only the log can tell
    assert place.route is None
    place.stale = False
    again = of([5])
    again.route.worker = "w1"
    heard(place, again)
    assert place.route is not None
    assert place.route.worker == "w1"
    assert place.take(10) == []
