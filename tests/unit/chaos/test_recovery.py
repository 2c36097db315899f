"""What is told of streams that were struck, from histories that are written by hand."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bench.chaos.evidence import Answer, Choice
from bench.chaos.findings import Finding
from bench.chaos.history import GENERATE, Call, Called, Came, Ended, Invoked, Request, Used
from bench.chaos.recovery import Milestone, Scene, told
from bench.chaos.recovery_figures import COLUMNS, Outcome, attempts, errors, finished, recoveries, recovery_s
from bench.chaos.scenarios import RecoveryConfig, Scenario, faults_of, streams_of
from bench.chaos.schedule import Fault, Kind
from bench.chaos.traffic import GREEDY, SEEDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.chaos.traffic import Payload

GOOD = Outcome("kill", ["struck"], 4, 4, 2, 0, 0, {"p50": 1.0, "p90": 2.0, "p99": 2.5, "max": 3.0}, 0, [])


def request(*calls: list[tuple[float, int]], status: str = "OK", moves: int = 1, at: float = 0.0) -> Request:
    """Each call a list of (time, index) of single tokens; all but the last call are cut off."""
    made = Request(Invoked("r", at, "d", "greedy"))
    for number, chunks in enumerate(calls):
        last = number == len(calls) - 1
        call = Call(Called("r", number, at, GENERATE, "g"))
        for when, index in chunks:
            finish = "STOP" if last and (when, index) == chunks[-1] else ""
            call.chunks.append(Came("r", number, when, 0, index, (7,), "x", finish))
        call.ended = Ended("r", number, 99.0, status if last else "UNAVAILABLE")
        if last:
            call.usage = Used("r", number, 99.0, 1, 0, 1, moves)
        made.calls.append(call)
    return made


def test_recovery_is_the_longest_wait_for_a_new_token_since_the_strike() -> None:
    assert recovery_s(request([(1.0, 0), (2.0, 1), (5.0, 2)]), 3.0) == 2.0
    assert recovery_s(request([(1.0, 0), (2.0, 1)], [(4.0, 0), (4.5, 1), (6.0, 2)]), 3.0) == 3.0
    assert recovery_s(request([(1.0, 0), (3.25, 1), (3.5, 2), (7.0, 3), (7.5, 4)]), 3.0) == 3.5, "some was on its way"
    assert recovery_s(request([(1.0, 0)]), 3.0) is None
    assert recovery_s(request([(7.0, 0), (8.0, 1), (8.5, 2)]), 3.0) == 1.0, (
        "what waited for a first token did not recover"
    )


def test_only_those_that_were_struck_recover() -> None:
    moved = request([(1.0, 0), (4.0, 1)], moves=2)
    again = request([(1.0, 0)], [(9.0, 1)])
    alone = request([(1.0, 0), (3.1, 1)])
    later = request([(8.0, 0)], moves=2, at=7.0)
    assert recoveries([moved, again, alone, later], 3.0) == {"p50": 3.5, "p90": 5.5, "p99": 5.95, "max": 6.0}
    assert recoveries([alone], 3.0) == {}
    assert [attempts(each) for each in (moved, again, alone)] == [2, 1, 1]
    assert attempts(Request(Invoked("r", 0.0, "d", "greedy"))) == 0


def test_calls_that_end_otherwise_are_errors() -> None:
    open_call = request([(1.0, 0)])
    open_call.calls[0].ended = None
    assert errors([request([(1.0, 0)]), request([(1.0, 0)], [(2.0, 1)]), open_call]) == 2
    cut = request([(1.0, 0)])
    cut.calls[0].chunks = [replace(chunk, finish="") for chunk in cut.calls[0].chunks]
    assert finished([request([(1.0, 0)]), cut]) == 1


@pytest.mark.parametrize(
    ("outcome", "passed"),
    [
        (GOOD, True),
        (replace(GOOD, finished=3), False),
        (replace(GOOD, findings=[Finding("I2", "gap", "r", "x")]), False),
        (replace(GOOD, errors=1), False),
        (replace(GOOD, errors=1, expects_errors=True), True),
        (replace(GOOD, expects_fenced=True), False),
        (replace(GOOD, expects_fenced=True, fenced=1), True),
    ],
)
def test_what_passes(outcome: Outcome, passed: bool) -> None:
    assert outcome.passed is passed
    assert outcome.as_dict()["passed"] is passed
    assert told({}, [GOOD, outcome], [])["passed"] is passed
    assert told({}, [GOOD], outcome.findings)["passed"] is not bool(outcome.findings)


def test_a_line_of_the_table() -> None:
    cells = ("kill", "4", "4", "2", "0", "0", "1.00 s", "2.00 s", "2.50 s", "3.00 s", "0", "0")
    assert GOOD.cells() == cells
    assert len(cells) == len(COLUMNS)
    assert replace(GOOD, recovery_s={}).cells()[6:10] == ("-",) * 4


def test_streams_are_equally_long() -> None:
    made = streams_of(RecoveryConfig(streams=20, tokens=33))
    assert [payload.kind for payload in made] == [GREEDY, SEEDED] * 10
    assert {payload.n for payload in made} == {1}
    assert {(each.request.stopping.max_tokens, each.request.stopping.ignore_eos) for each in made} == {(33, True)}
    assert not any(payload.request.stopping.stop for payload in made)
    assert len({payload.digest for payload in made}) == 20


def test_what_strikes_whom() -> None:
    config = RecoveryConfig(freeze_s=9.0)
    struck = {scenario: faults_of(scenario, config, "w0", "g0") for scenario in Scenario}
    assert struck == {
        Scenario.KILL: [Fault(0.0, Kind.WORKER_KILL, "w0")],
        Scenario.PAIR: [Fault(0.0, Kind.GATEWAY_KILL, "g0"), Fault(0.5, Kind.WORKER_KILL, "w0")],
        Scenario.FREEZE: [Fault(0.0, Kind.WORKER_FREEZE, "w0", 9.0)],
        Scenario.CUT: [Fault(0.0, Kind.WORKER_CUT, "w0", 9.0)],
        Scenario.ROLL: [Fault(0.0, Kind.WORKERS_ROLL, "workers")],
    }


def test_a_milestone_is_reached_by_all() -> None:
    recorder = Milestone(2, 3)
    for name, tokens in (("a", (1, 2)), ("a", (3, 4)), ("b", (1, 2)), ("a", (5,)), ("b", ())):
        recorder.note(Came(name, 0, 1.0, 0, 0, tokens))
        assert not recorder.reached.is_set()
    recorder.note(Came("b", 0, 1.0, 0, 2, (3,)))
    assert recorder.reached.is_set()
    assert len(recorder.events) == 6


class EarlyEnd:
    """A driver of which one stream fails, and the others end, before all have their tokens."""

    def __init__(self, targets: object, recorder: Milestone, **_: object) -> None:
        self.recorder = recorder

    async def __aenter__(self) -> EarlyEnd:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def ask_each(self, payloads: Sequence[Payload], *, at_once: int) -> None:
        assert at_once == len(payloads) == 2
        for name, payload, finish in (("kill-0", payloads[0], "STOP"), ("kill-1", payloads[1], "ERROR")):
            tokens = (5, 6) if finish == "STOP" else ()
            self.recorder.note(Invoked(name, 1.0, payload.digest, payload.kind, deadline_s=240.0))
            self.recorder.note(Called(name, 0, 1.1, GENERATE, "g"))
            self.recorder.note(Came(name, 0, 1.2, 0, 0, tokens, "ab" if tokens else "", finish))
            status, retry = ("OK", None) if tokens else ("UNAVAILABLE", 1000)
            self.recorder.note(Ended(name, 0, 1.3, status, retry_after_ms=retry))


class ServedFleet:
    """Serves; nobody in it may be struck."""

    targets = ("g",)

    async def until_served(self) -> None:
        """It does."""


@pytest.mark.timeout(20)
async def test_streams_that_end_before_the_strike_are_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.chaos.recovery.Driver", EarlyEnd)
    config = RecoveryConfig(streams=2, tokens=4, after=3)
    asked = streams_of(config)
    oracle = {each.digest: Answer((Choice((5, 6), "ab", "STOP"),), prompt_tokens=1) for each in asked}
    notes: list[str] = []
    fleet: Any = ServedFleet()
    outcome = await Scene(config, fleet, oracle, notes.append).play(Scenario.KILL, asked, io.StringIO())
    assert (outcome.struck, outcome.streams, outcome.finished, outcome.moved) == ([], 2, 1, 0)
    assert [(each.name, each.where) for each in outcome.findings] == [("failed", "kill-1")]
    assert not outcome.passed
    assert notes == ["kill: all were over before each had 3 tokens, nobody was struck"]
    assert not replace(GOOD, struck=[]).passed
