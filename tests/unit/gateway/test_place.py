"""A reader's place in a job's output, from deliveries in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import JobLost
from gateway.place import Delivery, Offer, Place, is_terminal, well_formed, written_outside
from octavo.v1.inference_pb2 import CANCELLED, ERROR, LENGTH, STOP, Chunk, Usage
from octavo.v1.job_pb2 import FAILURE_UNAVAILABLE


def chunk(start: int, count: int = 1, finish: int = 0, *, choice: int = 0, used: int | None = None) -> Delivery:
    """A worker's delivery of tokens start, start + 1, ...; with the route when it is the job's first, and with usage
    when it ends its choice (`used`: tokens of all choices)."""
    ids = range(start, start + count)
    delivery = Delivery(chunk=Chunk(choice=choice, start=start, token_ids=ids, finish=finish))
    if start == choice == 0:
        delivery.route.worker = "w0"
    if finish:
        delivery.usage.completion_tokens = start + count if used is None else used
    return delivery


def outside(finish: int = CANCELLED) -> Delivery:
    return Delivery(chunk=Chunk(finish=finish, error="why"), failure=FAILURE_UNAVAILABLE)


def starts(deliveries: list[Delivery]) -> list[int]:
    return [delivery.chunk.start for delivery in deliveries]


def places(deliveries: list[Delivery]) -> list[tuple[int, int, int]]:
    """Choice, start and finish of each."""
    return [(each.chunk.choice, each.chunk.start, each.chunk.finish) for each in deliveries]


@pytest.fixture
def place() -> Place:
    """Of a job with one choice."""
    return Place(choices=1, capacity=4)


@pytest.fixture
def three() -> Place:
    """Of a job with three choices."""
    return Place(choices=3, capacity=100)


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


def written(choices: list[list[int]], order: list[int]) -> list[Delivery]:
    """The log of a job whose choices deliver so many tokens at a time, and then end; `order` interleaves them."""
    left = {choice: [*sizes, 0] for choice, sizes in enumerate(choices)}
    next_index, log, used = [0] * len(choices), list[Delivery](), 0
    for number in order:
        choice = sorted(left)[number % len(left)]
        size = left[choice].pop(0)
        finish = 0 if left[choice] else STOP
        used += size
        log.append(chunk(next_index[choice], size, finish, choice=choice, used=used))
        next_index[choice] += size
        if finish:
            del left[choice]
    log[0].route.worker = "w0"
    for each in log[1:]:
        each.ClearField("route")
    return log


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
