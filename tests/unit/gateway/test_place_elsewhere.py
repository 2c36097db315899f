"""A reader's place in a job's output that it has begun to read elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.place import Delivery, Offer, Place
from octavo.v1.inference_pb2 import STOP, Chunk
from tests.unit.gateway.deliveries import chunk, places, written


def test_a_reader_goes_on_where_it_was_elsewhere() -> None:
    place = Place(choices=2, capacity=10, after={0: 2})
    log = [chunk(0), chunk(0, choice=1), chunk(1), chunk(2), chunk(1, 1, STOP, choice=1, used=5)]
    assert place.refill(log) == 0
    assert places(place.take(10)) == [(1, 0, 0), (0, 2, 0), (1, 1, STOP)]
    # It has been told the route, so the next delivery needs none.
    assert place.offer(chunk(3)) is Offer.TAKEN
    assert place.open == {0}


def test_a_reader_that_has_nothing_yet_gets_the_route() -> None:
    place = Place(choices=1, capacity=10, after={0: 0})
    assert place.offer(chunk(1)) is Offer.LOG
    place.stale = False
    place.refill([chunk(0), chunk(1)])
    assert [each.HasField("route") for each in place.take(10)] == [True, False]


@pytest.mark.parametrize("last", [chunk(2, 1, STOP), chunk(3, 0, STOP)])
def test_an_end_is_told_to_who_has_all_its_tokens(last: Delivery) -> None:
    last.chunk.text, last.chunk.stop_match = "x", "end"
    place = Place(choices=1, capacity=10, after={0: 3})
    place.refill([chunk(0, 2), *([chunk(2)] if last.chunk.start == 3 else []), last])
    (end,) = place.take(10)
    assert (end.chunk.start, list(end.chunk.token_ids), end.chunk.finish) == (3, [], STOP)
    # The text of an end that was had comes no second time; of one that has no tokens it can't tell.
    assert end.chunk.text == ("x" if last.chunk.start == 3 else "")
    assert (end.chunk.stop_match, end.HasField("usage")) == ("end", True)
    assert place.ended
    assert place.offer(last) is Offer.SEEN
    assert last.chunk.text == "x"  # others read it too


def test_a_chunk_that_is_had_in_part_comes_without_those_tokens() -> None:
    place = Place(choices=1, capacity=10, after={0: 2})
    whole = Delivery(chunk=Chunk(token_ids=[7, 8, 9], text="abc", logprobs=[{"token_id": each} for each in (7, 8, 9)]))
    whole.route.worker = "w0"
    place.refill([whole])
    (rest,) = place.take(10)
    assert (rest.chunk.start, list(rest.chunk.token_ids), rest.chunk.text) == (2, [9], "abc")
    assert [each.token_id for each in rest.chunk.logprobs] == [9]
    assert not rest.HasField("route")
    assert place.next == [3]
    assert (whole.chunk.start, len(whole.chunk.token_ids)) == (0, 3)


def test_who_has_more_than_is_committed_waits_for_the_rest() -> None:
    place = Place(choices=1, capacity=10, after={0: 3})
    place.refill([chunk(0), chunk(1)])
    assert (len(place), place.ended) == (0, False)
    assert not place.behind({0: 2}, ())
    assert place.offer(chunk(2)) is Offer.SEEN
    assert place.offer(chunk(3)) is Offer.TAKEN


@given(data=st.data(), choices=st.lists(st.lists(st.integers(1, 3), max_size=6), min_size=1, max_size=3))
def test_wherever_a_reader_changes_its_gateway_it_gets_every_token_and_every_end_once(
    data: st.DataObject, choices: list[list[int]]
) -> None:
    total = sum(map(len, choices)) + len(choices)
    log = written(choices, data.draw(st.lists(st.integers(0, 11), min_size=total, max_size=total)))
    had = log[: data.draw(st.integers(0, len(log)))]
    after = dict.fromkeys(range(len(choices)), 0)
    for each in had:
        after[each.chunk.choice] += len(each.chunk.token_ids)
    place = Place(choices=len(choices), capacity=100, after={choice: next_ for choice, next_ in after.items() if next_})
    place.refill(log)
    got = place.take(100)
    for choice, sizes in enumerate(choices):
        mine = [each.chunk for each in got if each.chunk.choice == choice]
        assert [each.finish for each in mine] == [0] * (len(mine) - 1) + [STOP]
        index = after[choice]
        for each in mine:
            assert each.start == index
            index += len(each.token_ids)
        assert index == sum(sizes)
    assert place.ended
    assert place.usage.completion_tokens == sum(map(sum, choices))
