"""Exact findings in histories that are written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bench.chaos.checker import Figures, NoOracle, check, figures, oracle_of
from bench.chaos.evidence import Answer, Choice, JobFacts, LogEntry, Rules, Run, Scrape, Snapshot
from bench.chaos.findings import Finding, told
from bench.chaos.history import BAD, CANCEL, GENERATE, PROBE, Call, Called, Came, Ended, Invoked, Request, Used

if TYPE_CHECKING:
    from collections.abc import Mapping

RIGHT = Answer((Choice((7, 8, 9), "abc", "STOP"),), prompt_tokens=4)
WHOLE = ((0, (7, 8), "ab", ""), (2, (9,), "c", "STOP"))
LOSSY = Rules(lossless=False)


def call(
    number: int,
    *chunks: tuple[int, tuple[int, ...], str, str],
    status: str = "OK",
    used: int | None = None,
    after: Mapping[int, int] | None = None,
    retry: int | None = None,
    at: float = 1.0,
    verb: str = GENERATE,
    cancelled: bool = False,
    apart: float = 0.1,
) -> Call:
    """Of request r; chunks are (start, tokens, text, finish), ``apart`` seconds from each other."""
    made = Call(Called("r", number, at, verb, "g0", dict(after or {})))
    for index, (start, tokens, text, finish) in enumerate(chunks, 1):
        made.chunks.append(Came("r", number, at + apart * index, 0, start, tokens, text, finish))
    end = at + apart * (len(chunks) + 1)
    if used is not None:
        made.usage = Used("r", number, end, 4, 0, used, 1)
    made.ended = Ended("r", number, end, status, "", retry, cancelled)
    return made


def found(*calls: Call, rules: Rules | None = None, broker: Snapshot | None = None, **invoked: Any) -> list[str]:
    """What is found in a run of one request: invariants and names."""
    request = Request(Invoked("r", 1.0, "d", "greedy", **{"deadline_s": 10.0, **invoked}), list(calls))
    run = Run({"r": request}, {"d": RIGHT}, broker or Snapshot())
    return [f"{each.invariant} {each.name}" for each in check(run, rules or Rules())]


class TestWhatIsRight:
    def test_a_plain_answer(self) -> None:
        assert found(call(0, *WHOLE, used=3)) == []

    def test_replayed_from_the_start_by_another_gateway(self) -> None:
        first = call(0, (0, (7,), "a", ""), status="UNAVAILABLE")
        assert found(first, call(1, *WHOLE, used=3)) == []

    def test_gone_on_with_from_the_next_index(self) -> None:
        first = call(0, (0, (7, 8), "", ""), status="UNAVAILABLE")
        assert found(first, call(1, (2, (9,), "abc", "STOP"), after={0: 2}, used=3)) == []

    def test_cut_off_between_the_last_chunk_and_the_status(self) -> None:
        assert found(call(0, *WHOLE, status="UNAVAILABLE")) == []

    def test_its_own_deadline(self) -> None:
        late = call(0, (0, (7,), "a", ""), status="DEADLINE_EXCEEDED", at=10.8)
        assert found(late) == []

    def test_turned_away(self) -> None:
        assert found(call(0, status="RESOURCE_EXHAUSTED", retry=500), call(1, status="UNAVAILABLE")) == []

    def test_cancelled_and_told_so(self) -> None:
        stream = call(0, (0, (7,), "a", ""), (1, (), "", "CANCELLED"))
        assert found(stream, call(1, verb=CANCEL, cancelled=True)) == []

    def test_an_end_from_outside_has_no_place(self) -> None:
        failed = call(0, (0, (7,), "a", ""), (0, (), "", "ERROR"), status="UNAVAILABLE", retry=1000)
        assert found(failed, rules=LOSSY) == []

    def test_bad_input_refused(self) -> None:
        assert found(call(0, status="INVALID_ARGUMENT"), role=BAD, expect="INVALID_ARGUMENT") == []
        tried_twice = (call(0, status="UNAVAILABLE"), call(1, status="INVALID_ARGUMENT"))
        assert found(*tried_twice, role=BAD, expect="INVALID_ARGUMENT") == []


class TestStreams:
    @pytest.mark.parametrize(
        ("chunks", "expected"),
        [
            (((0, (7,), "a", ""), (2, (9,), "c", "STOP")), ["I2 gap", "I2 hole"]),
            (((0, (7, 8), "ab", ""), (1, (8,), "", ""), (2, (9,), "c", "STOP")), ["I2 repeat"]),
            ((*WHOLE, (3, (), "", "STOP")), ["I1 second end"]),
            ((*WHOLE, (3, (5,), "x", "")), ["I1 output behind the end"]),
            (((0, (7, 8, 9), "abc", ""),), ["I1 no end"]),
            (((0, (7, 5), "ab", ""), (2, (9,), "c", "STOP")), ["I3 differs"]),
            (((0, (7, 8), "abc", "STOP"),), ["I3 ends elsewhere"]),
            (((0, (7, 8, 9), "abc", "LENGTH"),), ["I3 ends elsewhere"]),
            (((0, (7, 8, 9, 9), "abcc", "STOP"),), ["I3 differs"]),
            (((0, (7, 8, 9), "abd", "STOP"),), ["I2 text"]),
            (((0, (7, 8, 9), "ab", "STOP"),), ["I2 text"]),
        ],
    )
    def test_one_call(self, chunks: tuple[tuple[int, tuple[int, ...], str, str], ...], expected: list[str]) -> None:
        assert found(call(0, *chunks)) == expected

    def test_usage(self) -> None:
        assert found(call(0, *WHOLE, used=5)) == ["I2 usage"]
        assert found(call(0, *WHOLE, used=3), call(1, *WHOLE, used=6)) == ["I2 usage"]

    def test_gone_on_with_from_somewhere_else(self) -> None:
        first = call(0, (0, (7,), "a", ""), status="UNAVAILABLE")
        assert found(first, call(1, (2, (9,), "c", "STOP"), after={0: 1})) == ["I2 gap", "I2 hole"]
        assert found(first, call(1, (2, (9,), "c", "STOP"), after={0: 2})) == ["I2 hole"]
        assert found(first, call(1, *WHOLE, after={0: 1})) == ["I2 repeat", "I2 text"]

    def test_a_replay_that_says_otherwise(self) -> None:
        first = call(0, (0, (7, 5), "ax", ""), status="UNAVAILABLE")
        assert found(first, call(1, *WHOLE)) == ["I3 differs"]
        first = call(0, (0, (7, 8), "ax", ""), status="UNAVAILABLE")
        assert found(first, call(1, *WHOLE)) == ["I2 text"]

    def test_a_choice_that_nobody_asked_for(self) -> None:
        odd = call(0, *WHOLE)
        odd.chunks.append(replace(odd.chunks[0], choice=1))
        assert found(odd) == ["I2 no such choice"]

    def test_text_of_part_of_an_answer(self) -> None:
        def decode(tokens: Any) -> str:
            return "".join("?????????abc"[token + 2] for token in tokens)

        part = call(0, (0, (7,), "b", ""), (1, (), "", "CANCELLED"))
        cancel = call(1, verb=CANCEL, cancelled=True)
        assert found(part, cancel, rules=Rules(decode=decode)) == ["I2 text"]
        assert found(part, cancel) == []


class TestEnds:
    def test_lost(self) -> None:
        assert found(call(0, (0, (7,), "a", ""), status="UNAVAILABLE"), rules=LOSSY) == ["I1 lost"]

    def test_lost_before_any_output_is_known_by_the_broker(self) -> None:
        broker = Snapshot(jobs={"r": JobFacts("ended", 1, 1)})
        assert found(call(0, status="UNAVAILABLE"), broker=broker) == ["I1 lost"]
        assert found(call(0, status="UNAVAILABLE")) == []

    def test_failed(self) -> None:
        failed = call(0, (0, (7,), "a", ""), (1, (), "", "ERROR"), status="UNAVAILABLE", retry=1000)
        assert found(failed) == ["I1 failed"]

    def test_ended_in_two_ways(self) -> None:
        failed = call(0, (0, (), "", "ERROR"), status="UNAVAILABLE", retry=1000)
        assert found(failed, call(1, *WHOLE)) == ["I1 two ends"]

    def test_cancelled_unasked(self) -> None:
        assert found(call(0, (0, (), "", "CANCELLED"))) == ["I1 cancelled unasked"]

    def test_hanging(self) -> None:
        open_call = call(0, *WHOLE)
        open_call.ended = None
        assert found(open_call) == ["I1 hang"]

    def test_expired_though_there_was_time(self) -> None:
        expired = call(0, (0, (7,), "a", ""), status="DEADLINE_EXCEEDED", at=10.8)
        assert found(expired, rules=Rules(ample_s=10.0)) == ["I1 expired"]
        assert found(expired, rules=Rules(ample_s=10.1)) == []
        assert found(call(0, *WHOLE, at=10.7), rules=Rules(ample_s=10.0)) == []

    def test_late(self) -> None:
        late = call(0, (0, (7,), "a", ""), status="DEADLINE_EXCEEDED", at=13.0)
        assert found(late) == ["I1 late"]

    def test_work_behind_a_cancel(self) -> None:
        stream = call(0, (0, (7,), "a", ""), (1, (8,), "b", ""), (2, (), "", "CANCELLED"), apart=2.0)
        assert found(stream, call(1, verb=CANCEL, at=2.0, cancelled=True)) == ["I1 output after a cancel"]
        assert found(stream, call(1, verb=CANCEL, at=4.0, cancelled=True)) == []
        # The stream's own gateway may have stood still.
        other = call(1, verb=CANCEL, at=2.0, cancelled=True)
        other.began = replace(other.began, target="g1")
        assert found(stream, other) == []


class TestCodes:
    @pytest.mark.parametrize("status", ["INTERNAL", "UNKNOWN", "INVALID_ARGUMENT", "ALREADY_EXISTS", "NOT_FOUND"])
    def test_a_good_request_meets_another_class(self, status: str) -> None:
        assert found(call(0, status=status), call(1, *WHOLE)) == ["I7 wrong class"]

    def test_no_retry_info_with_a_failure(self) -> None:
        failed = call(0, (0, (), "", "ERROR"), status="UNAVAILABLE")
        assert found(failed, rules=LOSSY) == ["I7 no RetryInfo"]

    def test_a_deadline_that_has_not_passed(self) -> None:
        assert found(call(0, status="DEADLINE_EXCEEDED"), call(1, *WHOLE)) == ["I7 wrong class"]

    def test_cancelled_by_nobody(self) -> None:
        assert found(call(0, status="CANCELLED"), call(1, *WHOLE)) == ["I7 wrong class"]

    def test_no_retry_info(self) -> None:
        assert found(call(0, status="RESOURCE_EXHAUSTED")) == ["I7 no RetryInfo"]

    def test_ok_for_a_failure(self) -> None:
        assert found(call(0, (0, (), "", "ERROR")), rules=LOSSY) == ["I7 wrong class"]

    def test_bad_input(self) -> None:
        bad: dict[str, Any] = {"role": BAD, "expect": "INVALID_ARGUMENT"}
        assert found(call(0, *WHOLE), **bad) == ["I7 bad input served", "I7 never refused"]
        assert found(call(0, status="INTERNAL"), **bad) == ["I7 never refused", "I7 wrong class"]

    def test_no_service_afterwards(self) -> None:
        assert found(call(0, status="UNAVAILABLE"), role=PROBE) == ["I7 not served afterwards"]
        assert found(call(0, *WHOLE), role=PROBE) == []


class TestLogs:
    def test_a_client_knows_what_the_log_does_not(self) -> None:
        broker = Snapshot(jobs={"r": JobFacts("ended", 1, 1)}, logs={"r": (LogEntry(1, 0, 0, (7, 8)),)})
        assert found(call(0, *WHOLE), broker=broker) == ["I2 not in the log"]

    def test_what_the_broker_lost_is_only_required_of_those_that_ended_well(self) -> None:
        broker = Snapshot(jobs={"r": JobFacts("ended", 1, 1)}, logs={"r": (LogEntry(1, 0, 0, (7,)),)})
        failed = call(0, (0, (7, 8), "ab", ""), (0, (), "", "ERROR"), status="UNAVAILABLE", retry=1000)
        assert found(failed, broker=broker, rules=LOSSY) == ["I2 not in the log"]
        lossy = replace(LOSSY, broker_loses=True)
        assert found(failed, broker=broker, rules=lossy) == []
        assert found(call(0, *WHOLE), broker=broker, rules=lossy) == ["I2 not in the log"]

    def test_the_log_differs_where_the_client_saw_nothing(self) -> None:
        broker = Snapshot(logs={"r": (LogEntry(1, 0, 0, (7, 5)),)})
        stream = call(0, (0, (7,), "a", ""), (1, (), "", "CANCELLED"))
        assert found(stream, call(1, verb=CANCEL, cancelled=True), broker=broker) == ["I3 differs"]


class TestLedger:
    def test_clients_have_more_answers_than_it_counts(self) -> None:
        broker = Snapshot(ledger={"accepted": 1, "finished": 0, "cancelled": 1})
        assert found(call(0, *WHOLE, used=3), broker=broker) == ["I1 ledger lacks"]
        assert found(call(0, *WHOLE, used=3), broker=broker, rules=Rules(broker_loses=True)) == []
        assert found(call(0, *WHOLE, used=3), broker=Snapshot(ledger={"accepted": 2, "finished": 2})) == []


def test_an_oracle_is_what_came_without_faults() -> None:
    plain = Request(Invoked("r", 0.0, "d", "greedy"), [call(0, *WHOLE, used=3)])
    assert oracle_of([plain]) == {"d": RIGHT}
    other = Request(Invoked("s", 0.0, "d", "greedy"), [call(0, (0, (7,), "a", "STOP"), used=1)])
    with pytest.raises(NoOracle, match="two answers without any fault"):
        oracle_of([plain, other])
    with pytest.raises(NoOracle, match="was not answered"):
        oracle_of([Request(plain.invoked, [call(0, *WHOLE, used=3, status="UNAVAILABLE")])])
    with pytest.raises(NoOracle, match="was not asked without faults"):
        check(Run({"r": plain}, {}), Rules())


def test_figures() -> None:
    cut = [call(0, (0, (7,), "a", ""), status="UNAVAILABLE"), call(1, *WHOLE, used=3)]
    assert cut[1].usage is not None
    cut[1].usage = replace(cut[1].usage, attempts=2)
    requests = {
        "r": Request(Invoked("r", 1.0, "d", "greedy"), cut),
        "lost": Request(Invoked("lost", 1.0, "d", "greedy"), [call(0, (0, (7,), "a", ""), status="UNAVAILABLE")]),
        "failed": Request(Invoked("failed", 1.0, "d", "greedy"), [call(0, (0, (), "", "ERROR"), status="UNAVAILABLE")]),
        "refused": Request(Invoked("refused", 1.0, "d", "greedy"), [call(0, status="UNAVAILABLE")]),
        "wrong": Request(Invoked("wrong", 1.0, "d", "greedy"), [call(0, (0, (7, 7, 9), "abc", "STOP"))]),
        "bad": Request(Invoked("bad", 1.0, "x", "greedy", role=BAD, expect="NOT_FOUND"), [call(0, status="NOT_FOUND")]),
    }
    moved = 'octavo_rehomed_total{outcome="moved"}'
    pages = {
        "g0/1": (Scrape(counters={moved: 1.0}), Scrape(counters={moved: 2.0, "octavo_resubmitted_total": 1.0})),
        "g1/2": (Scrape(counters={moved: 3.0, 'octavo_rehomed_total{outcome="stale"}': 9.0}),),
        "w0/3": (Scrape(counters={"octavo_fenced_total": 4.0}),),
    }
    run = Run(requests, {"d": RIGHT}, scrapes=pages)
    told = Figures(requests=5, accepted=4, finished=2, failed=1, refused=1, reattached=1, tokens=7, lost=2, differing=1)
    told = replace(told, resumed=1, rehomed=5, resubmitted=1, fenced=4)
    assert figures(run, check(run, Rules())) == told


def test_findings_are_told() -> None:
    assert told([]) == "no violation"
    findings = [Finding("I2", "gap", "r", "x"), Finding("I2", "gap", "a", "y"), Finding("I5", "blocks", "w0", "z")]
    assert told(findings, most=2).splitlines()[:4] == [
        "3 violations: 2 x I2 gap, 1 x I5 blocks",
        "  I2 gap: a: y",
        "  I2 gap: r: x",
        "  ... and 1 more",
    ]
    assert told(findings).splitlines()[-1].startswith("  I5: of every pool free + cached + used")
