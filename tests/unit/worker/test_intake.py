"""Which claims the intake hands over, and which of them it says are over: without a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from kvstore.entries import Entry
from kvstore.keys import Keys
from tests.unit.worker.test_journal import make_claim
from worker.intake import REMEMBERED_S, Intake
from worker.journal import Journal
from worker.rates import UNMEASURED, Rates

if TYPE_CHECKING:
    from kvstore.client import Broker


class NoBroker:
    """Nobody asks it for anything."""

    keys = Keys("test")

    def blocking(self) -> None:
        """A client that is never used."""


def make_intake(journal: Journal) -> Intake:
    return Intake(cast("Broker", NoBroker()), "w0", "incarnation", journal, Rates(UNMEASURED), max_running=8)


def test_a_claim_that_is_made_again_is_handed_over() -> None:
    """A broker that has lost a claim gives us the same entry once more, and the claim has the same attempt."""
    intake = make_intake(Journal("w0"))
    old, new = make_claim(), make_claim()
    assert old == new
    intake._claims.append(old)
    intake._end(old)
    assert intake.waiting == 0
    assert intake.news.is_set()
    intake._claims.append(new)
    claims, lost = intake.take()
    assert [claim is new for claim in claims] == [True]
    assert lost == set()
    assert not intake.news.is_set()


def test_of_two_claims_of_an_entry_that_wait_only_the_first_is_over() -> None:
    intake = make_intake(Journal("w0"))
    old, new = make_claim(), make_claim()
    intake._claims += [old, new]
    intake._end(old)
    claims, lost = intake.take()
    assert [claim is new for claim in claims] == [True]
    assert lost == set()


def test_what_runs_is_dropped_before_it_is_begun_again() -> None:
    journal = Journal("w0")
    intake = make_intake(journal)
    old, new = make_claim(), make_claim()
    journal.open(old, now=0.0)
    intake._end(old)
    intake._claims.append(new)
    claims, lost = intake.take()
    assert [claim is new for claim in claims] == [True]
    assert lost == {"r1"}
    assert intake.take() == ([], set())


def test_what_was_found_out_about_a_claim_does_not_end_its_repetition() -> None:
    """The question was asked before the broker got the claim again, and its answer came after that."""
    journal = Journal("w0")
    intake = make_intake(journal)
    old, new = make_claim(), make_claim()
    journal.open(old, now=0.0)
    assert journal.holds(new)
    intake._end(old)
    assert intake.take() == ([], set())
    intake._end(new)
    assert intake.take() == ([], {"r1"})


def test_what_does_not_run_any_more_is_not_dropped() -> None:
    journal = Journal("w0")
    intake = make_intake(journal)
    old, later = make_claim(), make_claim(entry="2-0")
    journal.open(old, now=0.0)
    intake._end(old)
    journal.open(later, now=0.0)
    assert intake.take() == ([], set())


@pytest.mark.parametrize("refused", [False, True])
async def test_what_was_claimed_of_a_job_that_has_ended_since_is_asked_for_again(*, refused: bool) -> None:
    """And nothing else is: not what waits, nor another life of its id, nor all that is pending."""
    intake = make_intake(Journal("w0"))
    stale, others = make_claim(), [make_claim(attempt=2), make_claim(entry="2-0")]
    intake._keep([stale, *others])
    intake.ended("r1", "1-0", 1, refused=refused)
    assert intake.take()[0] == others
    assert await intake._next() == [Entry("1-0", "r1")]
    assert intake._again == {}


async def test_an_end_that_was_refused_may_be_of_a_job_that_nobody_runs() -> None:
    intake = make_intake(Journal("w0"))
    intake.ended("r1", "1-0", 1, refused=False)
    assert intake._again == {}
    intake.ended("r1", "1-0", 1, refused=True)
    assert await intake._next() == [Entry("1-0", "r1")]


def test_words_are_remembered_for_a_while() -> None:
    intake = make_intake(Journal("w0"))
    for second, request_id in enumerate(["a", "b", "a", "c"]):
        intake._hear(request_id, float(second))
    assert intake._rung == {"b": 1.0, "a": 2.0, "c": 3.0}
    intake._hear("d", 1.0 + REMEMBERED_S)
    assert intake._rung == {"a": 2.0, "c": 3.0, "d": 1.0 + REMEMBERED_S}
    intake._hear("d", 9.0 + REMEMBERED_S)
    assert intake._rung == {"d": 9.0 + REMEMBERED_S}
