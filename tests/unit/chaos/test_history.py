"""Histories as lines, and put together."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chaos.history import (
    ATTACH,
    CANCEL,
    GENERATE,
    Called,
    Came,
    Ended,
    Event,
    HistoryBroken,
    Invoked,
    Recorder,
    Used,
    from_line,
    gather,
    read,
    to_line,
)

TIMES = st.floats(0, 1e9, allow_nan=False)
COUNTS = st.integers(0, 2**31)
SMALL = st.integers(0, 31)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Invoked, st.text(), TIMES, st.text(), st.text(), SMALL, st.text(), st.none() | TIMES, st.text()),
    st.builds(Called, st.text(), SMALL, TIMES, st.text(), st.text(), st.dictionaries(SMALL, COUNTS)),
    st.builds(
        *(Came, st.text(), SMALL, TIMES, SMALL, COUNTS),
        *(st.lists(COUNTS).map(tuple), st.text(), st.text(), st.text()),
    ),
    st.builds(Used, st.text(), SMALL, TIMES, COUNTS, COUNTS, COUNTS, SMALL),
    st.builds(Ended, st.text(), SMALL, TIMES, st.text(), st.text(), st.none() | COUNTS, st.booleans()),
)


@given(EVENTS)
def test_an_event_is_one_line_and_comes_back(event: Event) -> None:
    line = to_line(event)
    assert "\n" not in line
    assert from_line(line) == event


def test_lines_are_written_as_things_happen() -> None:
    out = io.StringIO()
    recorder = Recorder(out)
    first, second = Invoked("r", 1.0, "d", "greedy"), Called("r", 0, 1.5, GENERATE, "h:1", {1: 4})
    recorder.note(first)
    assert out.getvalue() == (
        '{"event":"invoked","request":"r","at":1.0,"digest":"d","kind":"greedy","n":1,"role":"load",'
        '"deadline_s":null,"expect":""}\n'
    )
    recorder.note(second)
    assert recorder.events == [first, second]
    assert list(read(io.StringIO(out.getvalue() + "\n"))) == [first, second]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        "{}",
        '{"event":"unknown","request":"r"}',
        '{"event":"called","request":"r"}',
        '{"event":"invoked","request":1,"at":1.0,"digest":"d","kind":"greedy"}',
        '{"event":"invoked","request":"r","at":true,"digest":"d","kind":"greedy"}',
        '{"event":"invoked","request":"r","at":1.0,"digest":"d","kind":"greedy","more":1}',
        '{"event":"came","request":"r","call":0,"at":1.0,"choice":0,"start":0,"tokens":["x"]}',
        '{"event":"called","request":"r","call":0,"at":1.0,"verb":"v","target":"t","after":[1]}',
    ],
)
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(HistoryBroken):
        from_line(line)


def test_requests_are_put_together() -> None:
    events: list[Event] = [
        Invoked("a", 0.0, "d", "greedy"),
        Called("a", 0, 0.1, GENERATE, "g0"),
        Invoked("b", 0.2, "e", "seeded"),
        Came("a", 0, 0.3, 0, 0, (5,), "x"),
        Ended("a", 0, 0.4, "UNAVAILABLE"),
        Called("a", 1, 0.5, ATTACH, "g1", {0: 1}),
        Called("a", 2, 0.6, CANCEL, "g1"),
        Used("a", 1, 0.7, 3, 0, 1, 2),
        Ended("a", 1, 0.8, "OK"),
    ]
    a, b = gather(events).values()
    assert (a.id, b.id, b.calls, b.cancelled_at) == ("a", "b", [], None)
    assert [call.status for call in a.calls] == ["UNAVAILABLE", "OK", ""]
    assert [call.began.verb for call in a.streams] == [GENERATE, ATTACH]
    assert a.calls[0].chunks == [Came("a", 0, 0.3, 0, 0, (5,), "x")]
    assert a.calls[1].usage == Used("a", 1, 0.7, 3, 0, 1, 2)
    assert math.isclose(a.cancelled_at or 0, 0.6)


SENT = Invoked("a", 0.0, "d", "greedy")
CALLED = Called("a", 0, 0.1, GENERATE, "g0")


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([SENT, SENT], "twice under one id"),
        ([CALLED], "was never sent"),
        ([SENT, Came("a", 0, 0.2, 0, 0)], "it never began"),
        ([SENT, Called("a", 1, 0.1, GENERATE, "g0")], "the next call would be 0"),
        ([SENT, CALLED, Ended("a", 0, 0.2, "OK"), Came("a", 0, 0.3, 0, 0)], "came behind its end"),
        ([SENT, CALLED, Ended("a", 0, 0.2, "OK"), Ended("a", 0, 0.3, "OK")], "ended behind its end"),
        ([SENT, CALLED, Came("a", -1, 0.2, 0, 0)], "it never began"),
    ],
)
def test_what_no_client_records_is_refused(events: list[Event], reason: str) -> None:
    with pytest.raises(HistoryBroken, match=reason):
        gather(events)
