"""The product's client under the eyes of the checker, against scripted gateways on real sockets."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from bench.chaos.checker import check, figures
from bench.chaos.driver import Driver, Habits
from bench.chaos.evidence import Answer, Choice, JobFacts, LogEntry, Rules, Run, Snapshot
from bench.chaos.history import (
    BAD,
    CANCEL,
    GENERATE,
    MERGED,
    Call,
    Called,
    Came,
    Ended,
    Invoked,
    Recorder,
    Request,
    gather,
)
from bench.chaos.product import Asked, Product
from bench.chaos.traffic import GREEDY, Payload
from gateway.client import Client
from octavo.v1 import inference_pb2
from tests.unit.gateway.scripted_gateway import (
    HALF,
    REQUEST,
    REST,
    UNAVAILABLE,
    Act,
    Fail,
    Fleet,
    Hang,
    running,
    said,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

RIGHT = Answer((Choice((10, 11, 12, 13), "abcd", "STOP"),), prompt_tokens=0)
PAYLOAD = Payload(REQUEST, GREEDY)


@asynccontextmanager
async def clients_of(fleet: Fleet, deadline_s: float = 20.0) -> AsyncIterator[Driver]:
    habits = Habits(deadline_s=deadline_s, rate=300.0, cancels=0.0, bad=0.0)
    async with asyncio.timeout(15), Driver(fleet.targets, Recorder(), seed=1, habits=habits) as driver:
        yield driver


def found(driver: Driver, rules: Rules | None = None) -> list[str]:
    """What the checker says of the history."""
    run = Run(gather(driver.recorder.events), {PAYLOAD.digest: RIGHT})
    return [f"{each.invariant} {each.name}" for each in check(run, rules or Rules())]


async def sent(fleet: Fleet, *, role: str = "load", cancel_at: int | None = None) -> tuple[Request, list[str]]:
    """One request by the product's client: its history, and what is found in it."""
    payload = Payload(REQUEST, GREEDY, "INVALID_ARGUMENT" if role == BAD else "")
    async with clients_of(fleet) as driver:
        assert await driver.send_merged(payload, role=role, cancel_at=cancel_at) == "r0"
        (request,) = gather(driver.recorder.events).values()
        return request, found(driver)


async def test_its_calls_are_one_in_the_history() -> None:
    cut: list[Act] = [*HALF, Fail(UNAVAILABLE)]
    async with running([cut, REST]) as fleet:
        request, broken = await sent(fleet)
        assert fleet.verbs == [["Generate", "Attach"]]
    (call,) = request.calls
    assert (call.began.verb, call.began.after, call.status) == (MERGED, {}, "OK")
    assert call.began.target == ",".join(fleet.targets)
    assert [(one.start, one.tokens, one.text, one.finish) for one in call.chunks] == [
        (0, (10,), "a", ""),
        (1, (11,), "b", ""),
        (2, (12,), "c", ""),
        (3, (13,), "d", "STOP"),
    ]
    assert call.usage is not None
    assert (call.usage.completion, call.usage.attempts) == (4, 1)
    assert broken == []


async def test_what_it_takes_for_a_broken_promise_is_found() -> None:
    gap: list[Act] = [said(0, 10, text="a"), said(2, 12, text="c")]
    async with running([gap]) as fleet:
        request, broken = await sent(fleet)
    assert request.calls[0].status == "DATA_LOSS"
    assert broken == ["I1 lost", "I7 wrong class"]


async def test_what_it_passes_on_is_judged_by_the_answer_without_faults() -> None:
    async with running([[said(0, 10, 99, text="ax"), *REST]]) as fleet:
        _, broken = await sent(fleet)
    assert broken == ["I3 differs"]


async def test_bad_input_is_refused_to_it_too() -> None:
    async with running([[Fail(grpc.StatusCode.INVALID_ARGUMENT, "no")]]) as fleet:
        request, broken = await sent(fleet, role=BAD)
    assert ([call.status for call in request.calls], broken) == (["INVALID_ARGUMENT"], [])


async def test_it_cancels_or_leaves() -> None:
    """Which of both is drawn."""
    cancelled: list[Act] = [*HALF, said(2, finish=inference_pb2.CANCELLED)]
    async with running([cancelled]) as fleet, clients_of(fleet) as driver:
        for _ in range(12):
            await driver.send_merged(PAYLOAD, cancel_at=1)
        requests = gather(driver.recorder.events)
        assert found(driver) == []
        assert fleet.gateways[0].cancelled
    left = [request for request in requests.values() if request.calls[0].status == "CANCELLED"]
    told = [request for request in requests.values() if request.calls[0].status == "OK"]
    assert len(left) + len(told) == 12
    assert left
    for request in left:
        (cancel,) = request.calls[1:]
        assert (cancel.began.verb, cancel.status) == (CANCEL, "OK")
    for request in told:
        assert request.calls[1].ended is not None
        assert request.calls[1].ended.cancelled


async def test_who_leaves_has_no_end() -> None:
    async with running([[*HALF, Hang()]]) as fleet:
        recorder = Recorder()
        product = Product(fleet.targets, recorder, random.Random(1), hangs_s=5.0)
        async with asyncio.timeout(15):
            await product.ask(Asked(REQUEST, time.monotonic() + 20.0, cancel_at=2, leaves=True))
        await product.close()
    ends = [(event.call, event.status) for event in recorder.events if isinstance(event, Ended)]
    assert ends == [(1, "OK"), (0, "CANCELLED")]
    assert sum(len(event.tokens) for event in recorder.events if isinstance(event, Came)) == 2


async def test_one_that_hangs_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> AsyncIterator[inference_pb2.GenerateResponse]:
        await asyncio.Event().wait()
        yield inference_pb2.GenerateResponse()

    monkeypatch.setattr("bench.chaos.driver.HANGS_S", 0.1)
    monkeypatch.setattr(Client, "generate", never)
    async with running([REST]) as fleet, clients_of(fleet, deadline_s=0.1) as driver:
        await driver.send_merged(PAYLOAD)
        (request,) = gather(driver.recorder.events).values()
        assert request.calls[0].ended is None
        assert found(driver) == ["I1 hang"]


async def test_every_third_of_a_load_is_its() -> None:
    async with running([[*HALF, *REST]]) as fleet, clients_of(fleet) as driver:
        await driver.load([PAYLOAD], [], 0.3)
        requests = gather(driver.recorder.events)
        run = Run(requests, {PAYLOAD.digest: RIGHT})
        assert check(run, Rules()) == []
    assert len(requests) > 9
    assert figures(run, []).merged == len(requests) // 3
    verbs = {request.calls[0].began.verb for request in requests.values()}
    assert verbs == {GENERATE, MERGED}


def test_a_job_that_it_asked_for_anew_has_a_log_of_its_own() -> None:
    """The first was cancelled by the gateway behind the broken connection."""
    call = Call(Called("r", 0, 1.0, MERGED, "g0,g1"))
    call.chunks.append(Came("r", 0, 1.1, 0, 0, (10, 11, 12, 13), "abcd", "STOP"))
    call.ended = Ended("r", 0, 1.2, "OK")
    request = Request(Invoked("r", 0.9, "d", GREEDY, deadline_s=20.0), [call])
    logs = {"r": (LogEntry(1, 0, 0, (10,)), LogEntry(0, 0, 0, (), "CANCELLED"))}
    broker = Snapshot(jobs={"r": JobFacts("ended", 1, 1)}, logs=logs)
    assert check(Run({"r": request}, {"d": RIGHT}, broker), Rules()) == []
    call.began = Called("r", 0, 1.0, GENERATE, "g0")
    (finding,) = check(Run({"r": request}, {"d": RIGHT}, broker), Rules())
    assert finding.name == "not in the log"


async def test_a_fleet_that_takes_nothing_is_found() -> None:
    async with running([[Fail(UNAVAILABLE)]]) as fleet, clients_of(fleet, deadline_s=0.3) as driver:
        await driver.send_merged(PAYLOAD)
        assert found(driver, Rules(ample_s=0.3)) == ["I7 never taken"]


async def test_who_left_is_counted_as_cancelled() -> None:
    async with running([[*HALF, Hang()]]) as fleet:
        recorder = Recorder()
        product = Product(fleet.targets, recorder, random.Random(1), hangs_s=5.0)
        recorder.note(Invoked("r1", time.monotonic(), PAYLOAD.digest, GREEDY, deadline_s=20.0))
        await product.ask(Asked(REQUEST, time.monotonic() + 20.0, cancel_at=1, leaves=True))
        await product.close()
    run = Run(gather(recorder.events), {PAYLOAD.digest: RIGHT})
    assert check(run, Rules()) == []
    counted = figures(run, [])
    assert (counted.accepted, counted.cancelled, counted.finished, counted.merged) == (1, 1, 0, 1)
