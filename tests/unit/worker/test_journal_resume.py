"""Claims that go on from what was said before: by an earlier attempt, or by this one before the broker lost it."""

from __future__ import annotations

import pytest

from octavo.v1 import inference_pb2, job_pb2
from tests.unit.worker.test_journal import make_claim, make_output
from worker.journal import Journal
from worker.past import Past
from worker.sequence import Finish


def test_a_later_attempt_counts_on_and_tells_no_route() -> None:
    journal = Journal("w1")
    journal.open(make_claim(n=3, attempt=2, past=(4, 2, 0), ended=frozenset({0}), cached=2), now=0.0)
    job = journal.running["r1"]
    assert (job.next_index, job.open, journal.open_choices, job.told) == ([4, 2, 0], {1, 2}, 2, True)
    assert journal.unstarted == [job]
    deliveries = [
        journal.record(make_output(choice=choice, start=start, cached_tokens=0), now=1.0)
        for choice, start in ((1, 2), (2, 0))
    ]
    assert [one is not None and (one.attempt, one.HasField("route")) for one in deliveries] == [(2, False)] * 2
    assert journal.unstarted == []
    ends = [
        journal.record(make_output(choice=choice, start=start, finish=Finish.LENGTH), now=1.0)
        for choice, start in ((2, 1), (1, 3))
    ]
    usages = [one.usage for one in ends if one is not None]
    assert usages == [
        inference_pb2.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=said, attempts=2) for said in (9, 10)
    ]
    assert journal.running == {}
    assert ends[1] is not None
    assert [journal.settle(one, "1-0") for one in ends if one is not None] == [False, True]


def test_a_later_attempt_at_which_nothing_was_said_begins() -> None:
    journal = Journal("w1")
    journal.open(make_claim(n=2, attempt=3, past=(0, 0), cached=0), now=0.0)
    delivery = journal.record(make_output(cached_tokens=2), now=0.5)
    assert delivery is not None
    assert delivery.route.cached_tokens == 2
    assert delivery.attempt == 3


@pytest.mark.parametrize("ending", [False, True])
def test_a_job_that_is_rolled_back_is_counted_from_its_log(ending: bool) -> None:
    """Also when its last tokens were on their way to Redis already."""
    journal = Journal("w0")
    journal.open(make_claim(n=2), now=0.0)
    for choice in (0, 1):
        for start in range(4):
            finish = Finish.LENGTH if ending and start == 3 else None
            journal.record(make_output(choice=choice, start=start, finish=finish), now=1.0)
    assert ("r1" in journal.ending) is ending
    job = journal.roll_back("r1", 1, "1-0", {0: 2}, since=9)
    assert job is not None
    assert (journal.running, journal.ending) == ({"r1": job}, {})
    assert (job.next_index, job.open, job.unsettled, job.rollbacks) == ([2, 4], {0, 1}, {0, 1}, 1)
    assert journal.record(make_output(start=4), now=1.0, seen=8) is None
    job.go_on(Past({0: (5, 6), 1: (7, 8, 9)}, frozenset({1})))
    assert (job.next_index, job.open, job.unsettled, job.told) == ([2, 3], {0}, {0}, True)
    last = journal.record(make_output(start=2, finish=Finish.STOP), now=1.0, seen=9)
    assert last is not None
    assert last.usage.completion_tokens == 6
    assert journal.settle(last, "1-0")


def test_a_job_that_is_rolled_back_ends_only_once_its_log_is_read() -> None:
    """Of choices that the gap was not in, nobody knows until then where an end belongs."""
    journal = Journal("w0")
    journal.open(make_claim(n=2, remaining=5000), now=0.0)
    for choice in (0, 1):
        for start in range(4):
            journal.record(make_output(choice=choice, start=start), now=1.0)
    assert journal.expired(5.0) == ["r1"]
    job = journal.roll_back("r1", 1, "1-0", {0: 2}, since=9)
    assert job is not None
    assert journal.expired(5.0) == []
    job.go_on(Past({0: (5, 6), 1: (7,)}, frozenset()))
    assert journal.expired(5.0) == ["r1"]
    ends = journal.fail("r1", job_pb2.FAILURE_DEADLINE, "late")
    assert [(end.chunk.choice, end.chunk.start) for end in ends] == [(0, 2), (1, 1)]


def test_a_job_that_lost_its_first_delivery_tells_its_route_again() -> None:
    journal = Journal("w0")
    journal.open(make_claim(), now=0.0)
    journal.record(make_output(), now=1.0)
    job = journal.roll_back("r1", 1, "1-0", {0: 0}, since=0)
    assert job is not None
    job.go_on(Past({0: ()}, frozenset()))
    delivery = journal.record(make_output(), now=2.0)
    assert delivery is not None
    assert delivery.HasField("route")


def test_only_this_attempt_is_rolled_back_and_not_for_ever() -> None:
    journal = Journal("w0")
    assert journal.roll_back("r1", 1, "1-0", {}, since=0) is None
    journal.open(make_claim(attempt=2), now=0.0)
    assert journal.roll_back("r1", 1, "1-0", {0: 0}, since=0) is None
    rolled = [journal.roll_back("r1", 2, "1-0", {0: 0}, since=0) for _ in range(4)]
    assert [job is not None for job in rolled] == [True, True, True, False]


def test_a_claim_that_is_repeated_is_the_one_that_the_job_is_known_by() -> None:
    journal = Journal("w0")
    first, second, other = make_claim(n=1), make_claim(n=1), make_claim(entry="2-0")
    journal.open(first, now=0.0)
    assert not journal.holds(other)
    assert journal.running["r1"].claim is first
    assert journal.holds(second)
    assert journal.running["r1"].claim is second
    journal.record(make_output(finish=Finish.STOP), now=1.0)
    assert journal.holds(first)
    assert journal.ending["r1"].claim is first


def test_a_delivery_belongs_to_the_entry_by_which_its_job_was_claimed() -> None:
    """Also the last one, and when the id is another job's already."""
    journal = Journal("w0")
    assert journal.entry_of("r1") == ""
    journal.open(make_claim(entry="1-0"), now=0.0)
    assert journal.entry_of("r1") == "1-0"
    journal.record(make_output(finish=Finish.STOP), now=1.0)
    assert journal.entry_of("r1") == "1-0"
    journal.open(make_claim(entry="2-0"), now=2.0)
    assert journal.entry_of("r1") == "2-0"
