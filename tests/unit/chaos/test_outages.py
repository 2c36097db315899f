"""Only what was done to the whole fleet excuses that nobody is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.chaos.checker import check
from bench.chaos.evidence import Outage, Rules, Run, Snapshot
from bench.chaos.history import CANCEL, GENERATE, Call, Called, Came, Ended, Invoked, Request
from bench.chaos.nemesis import Struck
from bench.chaos.outages import outages
from bench.chaos.schedule import BROKER, WORKERS, Fault, Kind, Plan
from tests.unit.chaos.test_checker import RIGHT

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAN = Plan(200.0, ("w0", "w1"), ("g0",), start_s=15.0, all_at_once=True)


def struck(kind: Kind, target: str, begin: float, end: float, outcome: str = "done") -> Struck:
    return Struck(Fault(begin, kind, target, end - begin), begin, end, outcome)


class TestOutages:
    def test_the_broker_is_away(self) -> None:
        cut = struck(Kind.BROKER_CUT, BROKER, 10.0, 40.0)
        assert outages([cut], PLAN, 100.0) == (Outage(110.0, 140.0),)
        one_after_the_other = (
            struck(Kind.BROKER_CUT, BROKER, 10.0, 25.0),
            struck(Kind.BROKER_KILL, BROKER, 20.0, 40.0),
        )
        assert outages(one_after_the_other, PLAN, 0.0) == (Outage(10.0, 42.0),)

    def test_all_workers_are_away(self) -> None:
        both = [struck(Kind.WORKER_KILL, "w0", 10.0, 10.0), struck(Kind.WORKER_FREEZE, "w1", 12.0, 60.0)]
        assert outages(both, PLAN, 0.0) == (), "w0 is back at 25"
        both.append(struck(Kind.WORKER_CUT, "w0", 24.0, 70.0))
        assert outages(both, PLAN, 0.0) == (Outage(12.0, 60.0),)

    @pytest.mark.parametrize(
        "done",
        [
            [struck(Kind.BROKER_CUT, BROKER, 10.0, 39.0)],
            [struck(Kind.BROKER_SLOW, BROKER, 10.0, 90.0)],
            [struck(Kind.BROKER_CUT, BROKER, 10.0, 90.0, "skipped: the broker does not run")],
            [struck(Kind.WORKER_FREEZE, "w0", 10.0, 90.0)],
            [struck(Kind.WORKERS_ROLL, WORKERS, 10.0, 90.0)],
            [struck(Kind.GATEWAY_FREEZE, "g0", 10.0, 90.0)],
        ],
        ids=["short", "slow", "not done", "one worker", "one worker at a time", "gateways are many"],
    )
    def test_what_is_no_outage(self, done: Sequence[Struck]) -> None:
        assert outages(done, PLAN, 0.0) == ()


def found(
    *statuses: str,
    ended_at: float = 119.5,
    deadline_s: float = 120.0,
    out: Sequence[Outage] = (),
    failed: bool = False,
    cancelled: bool = False,
) -> list[str]:
    """What is found about one request with such calls, sent at 0, the last of which ends then."""
    request = Request(Invoked("r", 0.0, "d", "greedy", deadline_s=deadline_s))
    for number, status in enumerate(statuses):
        call = Call(Called("r", number, 1.0, GENERATE, "g0"))
        call.ended = Ended("r", number, ended_at, status, retry_after_ms=1000) if status else None
        request.calls.append(call)
    if failed:
        request.calls[-1].chunks.append(Came("r", len(statuses) - 1, ended_at, 0, 0, finish="ERROR"))
    if cancelled:
        number = len(statuses)
        request.calls.append(Call(Called("r", number, 2.0, CANCEL, "g0"), ended=Ended("r", number, 3.0, "OK")))
    ledger = {"accepted": 1, "failed": 1} if failed else {}
    run = Run({"r": request}, {"d": RIGHT}, Snapshot(ledger=ledger), outages=tuple(out))
    return [f"{each.invariant} {each.name}" for each in check(run, Rules())]


class TestNeverTaken:
    @pytest.mark.parametrize(
        "statuses",
        [
            ("UNAVAILABLE",),
            ("UNAVAILABLE", "RESOURCE_EXHAUSTED"),
            ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"),
        ],
    )
    def test_refused_to_its_end(self, statuses: tuple[str, ...]) -> None:
        ended_at = 120.0 if "DEADLINE_EXCEEDED" in statuses else 119.5
        assert found(*statuses, ended_at=ended_at) == ["I7 never taken"]

    def test_who_had_little_time_may_be_refused(self) -> None:
        assert found("UNAVAILABLE", deadline_s=59.0, ended_at=58.5) == []

    def test_who_is_refused_for_another_reason_is_told_of_that(self) -> None:
        assert found("UNAVAILABLE", "INVALID_ARGUMENT") == ["I7 wrong class"]
        assert found("UNAVAILABLE", "") == ["I1 hang"]

    def test_who_gave_up_itself_was_not_refused(self) -> None:
        assert found("UNAVAILABLE", "UNAVAILABLE", cancelled=True) == []

    def test_an_outage_excuses_what_ends_in_it(self) -> None:
        assert found("UNAVAILABLE", out=[Outage(85.0, 125.0)]) == []
        assert found("UNAVAILABLE", out=[Outage(85.0, 118.0)]) == []
        assert found("UNAVAILABLE", out=[Outage(20.0, 60.0)]) == ["I7 never taken"], "it was over long before"
        assert found("UNAVAILABLE", out=[Outage(100.0, 140.0)]) == ["I7 never taken"], "it had just begun"
        assert found("RESOURCE_EXHAUSTED", out=[Outage(85.0, 125.0)]) == ["I7 never taken"]


class TestFailed:
    def test_an_outage_excuses_who_waited_in_vain(self) -> None:
        assert found("UNAVAILABLE", failed=True, ended_at=50.0) == ["I1 failed", "I1 ledger fails"]
        assert found("UNAVAILABLE", failed=True, ended_at=50.0, out=[Outage(19.0, 60.0)]) == []
        assert found("UNAVAILABLE", failed=True, ended_at=50.0, out=[Outage(30.0, 61.0)]) == [
            "I1 failed",
            "I1 ledger fails",
        ]
