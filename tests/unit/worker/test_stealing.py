"""Whom a free worker asks for jobs."""

from __future__ import annotations

import pytest

from kvstore.help import Call
from tests.unit.worker.test_journal import make_claim, make_output
from worker.journal import Journal
from worker.rates import Measured
from worker.stealing import FRESH_S, Calls, place_s


def call(worker: str, wait_s: float) -> Call:
    return Call(worker, wait_s, 0.5)


def test_the_longest_wait_is_asked_first_and_the_next_one_after_it() -> None:
    calls = Calls()
    assert not calls
    for worker, wait_s in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        calls.heard(call(worker, wait_s), 10.0)
    assert calls
    assert calls.longest(10.1) == call("b", 3.0)
    calls.answered("b")
    assert calls.longest(10.1) == call("c", 2.0)
    calls.answered("c")
    calls.answered("a")
    assert calls.longest(10.1) is None
    assert not calls


def test_a_call_counts_as_it_was_made_last_and_not_for_long() -> None:
    calls = Calls()
    calls.heard(call("a", 5.0), 10.0)
    calls.heard(call("a", 1.0), 10.2)
    calls.heard(call("b", 2.0), 10.1)
    assert calls.longest(10.2) == call("b", 2.0)
    assert calls.longest(10.1 + FRESH_S + 0.05) == call("a", 1.0)
    assert calls.longest(10.2 + FRESH_S + 0.05) is None
    assert not calls


def test_of_equal_waits_one_is_chosen() -> None:
    calls = Calls()
    calls.heard(call("b", 1.0), 0.0)
    calls.heard(call("a", 1.0), 0.0)
    assert calls.longest(0.0) == call("b", 1.0)


@pytest.mark.parametrize(
    ("max_running", "answer", "seconds"),
    [
        (1, 100, 1.0),  # 100 steps of 10 ms
        (11, 110, 0.2),  # 110 steps of 20 ms, in which 11 jobs end
        (11, 0, 0.0),
    ],
)
def test_a_full_batch_gives_up_places_as_its_jobs_end(max_running: int, answer: float, seconds: float) -> None:
    assert place_s(Measured(1000.0, 10.0, 1.0), max_running, answer) == pytest.approx(seconds)


def test_a_job_waits_until_its_first_output() -> None:
    journal = Journal("w0")
    assert journal.unstarted == []
    journal.open(make_claim("r1", n=2), now=0.0)
    journal.open(make_claim("r2"), now=0.0)
    journal.record(make_output(choice=1), now=1.0)
    assert [job.claim.job.request_id for job in journal.unstarted] == ["r2"]
    journal.record(make_output(request_id="r2"), now=1.0)
    assert journal.unstarted == []
