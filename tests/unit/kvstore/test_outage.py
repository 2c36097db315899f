"""What the log says of an outage."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.errors import BrokerAuth, BrokerUnreachable
from kvstore.outage import REFUSED_S, Outage, Refusals

if TYPE_CHECKING:
    import pytest


def test_an_outage_is_told_once_then_at_growing_intervals_then_that_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Tried once a second for 700 seconds, twice."""
    now = 0
    outage = Outage(logging.getLogger("x"), "reading jobs", clock=lambda: now)
    outage.worked()
    for _ in range(2):
        for _ in range(700):
            outage.failed("down")
            now += 1
        outage.worked()
        outage.worked()
    again = [f"reading jobs has failed for {seconds} s: down" for seconds in (10, 30, 70, 150, 310, 610)]
    once = ["reading jobs fails, trying again: down", *again, "reading jobs works again, after 700 s"]
    assert [record.getMessage() for record in caplog.records] == once * 2
    assert {record.levelno for record in caplog.records} == {logging.ERROR, logging.WARNING}


def test_a_fault_comes_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(logging.getLogger("x"), "looking")
    for error in (KeyError("ours"), KeyError("ours")):
        try:
            raise error
        except KeyError:
            outage.failed(error, traceback=True)
    (record,) = caplog.records
    assert (record.getMessage(), record.levelno) == ("looking fails", logging.ERROR)
    assert record.exc_info is not None


def test_refusals_in_a_row_end_when_they_have_lasted() -> None:
    """What is away for a while begins the time anew: it may come back with other rules."""
    now = 0.0
    refusals = Refusals(clock=lambda: now)
    told = []
    for error in (BrokerAuth("no"), BrokerUnreachable("away"), BrokerAuth("no"), BrokerAuth("no"), BrokerAuth("no")):
        told.append(refusals.last(error))
        now += REFUSED_S / 2
    assert told == [False, False, False, False, True]
