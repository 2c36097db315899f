"""What a worker tells of traced jobs: which parts, from when to when, and that nothing of them is left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from octavo.v1 import inference_pb2, job_pb2
from tests.unit.worker.engine_run import engine_of, prompt_of, request
from tests.unit.worker.test_journal import make_claim
from worker.step import StepOutput, StepStats
from worker.stepper import Stepped
from worker.traces import Traces

if TYPE_CHECKING:
    from kvstore.jobs import Claim
    from kvstore.tracing import Tracing

NOT_YET = inference_pb2.FINISH_REASON_UNSPECIFIED
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Told:
    """Stands where the traces go: what has been told, as lines."""

    lines: list[str] = field(default_factory=list)
    parent = "-"

    def begin(self, name: str, began: float, parent: str = "", *, serves: bool = False) -> Told:
        assert (name, parent, serves) == ("octavo.run", PARENT, False)
        self.lines.append(f"begin {began:g}")
        return self

    def tell(self, **attributes: str | int) -> None:
        self.lines.append(" ".join(f"{name}={value}" for name, value in attributes.items()))

    def part(self, name: str, began: float, ended: float) -> None:
        self.lines.append(f"{name} {began:g}-{ended:g}")

    def end(self, outcome: str, ended: float, *, failed: bool = False) -> None:
        self.lines.append(f"{outcome} {ended:g}{' failed' if failed else ''}")

    async def close(self) -> None:
        return


def claim(parent: str = PARENT, **fields: int | str) -> Claim:
    made = make_claim()
    made.job.request_id, made.job.traceparent = "r1", parent
    return replace(made, queued_ms=500, **fields)  # type: ignore[arg-type]


def stepped(began: float, *admitted: str) -> Stepped:
    stats = StepStats(*[0] * 13, tokens=1, sequences=1, decoded=1)
    return Stepped(stats, 1, output=StepOutput((), stats, admitted=admitted), began=began, ended=began + 1)


def delivery(*tokens: int, attempt: int = 1, finish: inference_pb2.FinishReason = NOT_YET) -> job_pb2.Delivery:
    made = job_pb2.Delivery(request_id="r1", attempt=attempt)
    made.chunk.token_ids.extend(tokens)
    made.chunk.finish = finish
    made.usage.completion_tokens = 2
    return made


def traces() -> tuple[Traces, list[str]]:
    told = Told()
    return Traces(cast("Tracing", told)), told.lines


def test_parts_follow_on_each_other() -> None:
    """Its prompt takes two steps; the broker has its end a while after the last one."""
    made, lines = traces()
    made.claimed(claim(), 10.0)
    made.stepped(stepped(11.0), [])
    made.stepped(stepped(12.0, "r1", "r2"), [])
    made.stepped(stepped(13.0), [delivery(5)])
    made.stepped(stepped(14.0), [delivery(6, finish=inference_pb2.LENGTH)])
    made.settled(delivery(finish=inference_pb2.LENGTH), 15.5, refused=False)
    assert lines[2:] == [
        *("claim 9.5-10", "wait 10-12", "prefill 12-14", "cached_tokens=0 completion_tokens=2"),
        *("decode 14-15", "length 15.5"),
    ]
    assert lines[0] == "begin 9.5"
    assert lines[1].startswith("request_id=r1 attempt=1 prompt_tokens=")
    assert len(made) == 0


def test_who_is_dropped_or_refused_has_ended_all_the_same() -> None:
    made, lines = traces()
    made.claimed(claim(), 10.0)
    made.ended("r1", "left", 11.0, failed=True)
    made.ended("r1", "left", 12.0, failed=True)
    assert lines[-1] == "left 11 failed"
    made.claimed(claim(), 20.0)
    made.settled(delivery(finish=inference_pb2.STOP), 21.0, refused=True)
    assert lines[-1] == "fenced 21 failed"
    made.claimed(claim(), 30.0)
    made.settled(delivery(finish=inference_pb2.ERROR), 31.0, refused=False)
    assert lines[-1] == "error 31 failed"
    assert len(made) == 0


def test_a_claim_that_is_repeated_is_the_same_and_another_attempt_is_not() -> None:
    made, lines = traces()
    made.claimed(claim(), 10.0)
    known = len(lines)
    made.claimed(claim(), 11.0)
    assert len(lines) == known
    made.settled(delivery(attempt=2, finish=inference_pb2.STOP), 12.0, refused=False)
    assert len(lines) == known
    made.claimed(claim(attempt=2), 13.0)
    assert lines[known:][0] == "replaced 13 failed"
    assert len(made) == 1


def test_what_is_not_traced_costs_nothing() -> None:
    made, lines = traces()
    made.claimed(claim(parent=""), 10.0)
    made.stepped(stepped(11.0, "r1"), [delivery(5)])
    made.settled(delivery(finish=inference_pb2.STOP), 12.0, refused=False)
    assert (lines, len(made)) == ([], 0)


def test_a_step_tells_whom_it_has_taken_in_for_the_first_time() -> None:
    """Not those that come back after they were preempted."""
    engine, _ = engine_of(num_blocks=8, max_running=2, token_budget=8)
    engine.add(request("a", prompt_of(12), max_tokens=12))
    engine.add(request("b", prompt_of(12, seed=1), max_tokens=12))
    engine.add(request("c", prompt_of(4, seed=2), max_tokens=2))
    admitted = []
    while engine.has_work:
        admitted += engine.step().admitted
    assert sorted(admitted) == ["a", "b", "c"]
    assert engine.stats().preemptions > 0
