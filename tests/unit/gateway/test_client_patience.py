"""How long the client waits for gateways, and what it leaves behind when its caller leaves."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest

from gateway import asking
from gateway import client as module
from gateway.client import Client, retry_after
from octavo.v1.inference_pb2 import CANCELLED, Chunk, GenerateRequest, GenerateResponse
from tests.unit.gateway.scripted_gateway import (
    HALF,
    ID,
    REQUEST,
    REST,
    UNAVAILABLE,
    WHOLE,
    Accept,
    Fail,
    Hang,
    error_of,
    heard,
    running,
    told,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


FULL = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "all queues are full", (("retry-after-ms", "200"),))


async def test_a_full_fleet_is_given_the_time_it_asks_for() -> None:
    async with running([[FULL], [*HALF, *REST]]) as fleet:
        started = time.monotonic()
        assert told(await heard(fleet)) == WHOLE
        assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize("settings", [{"patience_s": 0.1}, {"accept_s": 0.0}, {"timeout": 0.15}])
async def test_a_full_fleet_is_not_waited_for_in_vain(settings: dict[str, float]) -> None:
    async with running([[FULL]]) as fleet:
        assert (await error_of(fleet, **settings)).details() == "all queues are full"
    assert fleet.verbs == [["Generate"]]


async def test_what_will_never_fit_is_not_asked_for_again() -> None:
    async with running([[Fail(grpc.StatusCode.RESOURCE_EXHAUSTED)]]) as fleet:
        await error_of(fleet)
    assert fleet.verbs == [["Generate"]]


FORSAKEN = GenerateResponse(chunks=[Chunk(finish=CANCELLED, abandoned=True)])


async def test_gateways_that_end_job_after_job_are_given_pauses_and_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first time may be a broken connection's fault: nothing is waited for then."""
    monkeypatch.setattr(asking, "PAUSE_S", (0.02, 0.1))
    async with running([[FORSAKEN]]) as fleet:
        error = await error_of(fleet, patience_s=0.3)
    assert error.details() == "the job was ended again as if its caller had left"
    calls = fleet.gateways[0].calls
    assert 3 <= len(calls) <= 12
    assert len({each.request.request_id for each in calls}) == len(calls)


async def test_the_next_gateway_is_asked_where_one_ends_all_jobs() -> None:
    async with running([[FORSAKEN]], [[*HALF, *REST]]) as fleet:
        assert told(await heard(fleet)) == WHOLE
    assert fleet.verbs == [["Generate"] * 2, ["Generate"]]


async def test_patience_ends_with_the_last_error() -> None:
    async with running([[*HALF, Fail(UNAVAILABLE, "first")], [Fail(UNAVAILABLE, "later")]]) as fleet:
        started = time.monotonic()
        assert (await error_of(fleet, patience_s=0.2)).details() == "later"
        assert 0.15 < time.monotonic() - started < 5
    assert fleet.verbs[0][:2] == ["Generate", "Attach"]


async def test_who_waits_for_gateways_is_told_so_once_in_a_row() -> None:
    """Not while another one may go on at once."""
    heard_of: list[str | None] = []

    def hear(error: grpc.aio.AioRpcError) -> None:
        heard_of.append(error.details())

    async with running([[*HALF, Fail(UNAVAILABLE, "one")]], [[*REST]]) as fleet:
        assert told(await heard(fleet, on_trouble=hear)) == WHOLE
    assert heard_of == []
    gone = [Fail(UNAVAILABLE, f"gone {number}") for number in range(3)]
    async with running([[*HALF, gone[0]], [gone[2]]], [[gone[1]]]) as fleet:
        await error_of(fleet, patience_s=0.3, on_trouble=hear)
    assert heard_of == ["gone 1"]


async def test_without_patience_each_gateway_is_asked_once() -> None:
    async with running([[Fail(UNAVAILABLE, "one")]], [[Fail(UNAVAILABLE, "two")]]) as fleet:
        assert (await error_of(fleet, accept_s=0.0)).details() == "two"
    assert fleet.verbs == [["Generate"], ["Generate"]]


async def test_patience_begins_anew_with_each_token() -> None:
    async with running([[HALF[0], Fail(UNAVAILABLE)], [HALF[1], Fail(UNAVAILABLE)], REST]) as fleet:
        fleet.gateways *= 2  # the first failure in a row is borne, two are not
        assert told(await heard(fleet, patience_s=0.0)) == WHOLE


async def test_one_deadline_holds_for_all_calls() -> None:
    later = Fail(UNAVAILABLE, "the gateway is stopping", (("retry-after-ms", "100"),))
    async with running([[*HALF, later], [Hang()]]) as fleet:
        started = time.monotonic()
        assert (await error_of(fleet, timeout=0.5)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started < 5
    first, second = (call.left for call in fleet.gateways[0].calls)
    assert first is not None
    assert second is not None
    assert 0 < second < first - 0.05
    assert first < 1


async def test_who_leaves_cancels_the_call() -> None:
    async with running([[*HALF, Hang()]]) as fleet, Client(fleet.targets) as client:
        async with aclosing(client.generate(REQUEST)) as answer:
            assert told([await anext(answer)]) == ([10], "a", [])
            await fleet.gateways[0].hanging.wait()
        await fleet.gateways[0].left.wait()
    assert fleet.gateways[0].cancelled == []  # the gateways saw it themselves


async def test_who_is_cancelled_cancels_the_call() -> None:
    async with running([[Hang()]]) as fleet, Client(fleet.targets) as client:
        call = asyncio.ensure_future(anext(client.generate(REQUEST)))
        await fleet.gateways[0].hanging.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await fleet.gateways[0].left.wait()
    assert fleet.gateways[0].cancelled == []  # the gateway saw it itself


@pytest.mark.parametrize("detached", [False, True])
async def test_who_is_cancelled_between_two_calls_cancels_the_job(
    monkeypatch: pytest.MonkeyPatch, detached: bool
) -> None:
    """Unless it is to go on without anybody."""
    resting = asyncio.Event()

    def rest(*_: Any) -> float:
        resting.set()
        return 50.0

    monkeypatch.setattr(asking.Asking, "after", rest)
    request = GenerateRequest(request_id=ID, text="p", detached=detached)
    async with running([[Accept(), Fail(UNAVAILABLE)]]) as fleet, Client(fleet.targets) as client:
        call = asyncio.ensure_future(anext(client.generate(request)))
        await resting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert fleet.gateways[0].cancelled == ([] if detached else [ID])


async def test_who_leaves_a_fleet_that_is_gone_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANCEL_S", 0.2)
    async with running([[HALF[0], Hang()]]) as fleet, Client(fleet.targets) as client:
        async with aclosing(client.generate(REQUEST)) as answer:
            await anext(answer)
            await fleet.gateways[0].stop()
        with pytest.raises(StopAsyncIteration):
            await anext(answer)


async def test_a_deadline_that_comes_between_two_calls_is_what_ended_the_request() -> None:
    later = Fail(UNAVAILABLE, "the gateway is stopping", (("retry-after-ms", "5000"),))
    async with running([[*HALF, later]]) as fleet:
        started = time.monotonic()
        error = await error_of(fleet, timeout=0.5)
        assert 0.5 <= time.monotonic() - started < 4
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    last = "the last one failed: UNAVAILABLE: the gateway is stopping"
    assert error.details() == f"the deadline passed between two calls; {last}"
    assert (fleet.verbs, fleet.gateways[0].cancelled) == ([["Generate"]], [ID])


def test_no_call_is_made_once_the_deadline_has_passed() -> None:
    late = asking.Asking(REQUEST, 1, timeout=0.0)
    with pytest.raises(grpc.aio.AioRpcError, match="between two calls") as failed:
        late.check()
    assert (failed.value.code(), late.given_up) == (grpc.StatusCode.DEADLINE_EXCEEDED, False)


@pytest.mark.parametrize("settings", [{"patience_s": 0.1}, {"timeout": 0.3}])
@pytest.mark.parametrize("detached", [False, True])
async def test_who_gives_up_cancels_the_job(settings: dict[str, float], detached: bool) -> None:
    """Unless it is to go on without anybody. The gateway that is there is told, the one that is not holds nobody up."""
    request = GenerateRequest(request_id=ID, text="p", detached=detached)
    gone = Fail(UNAVAILABLE, "w", (("retry-after-ms", "500"),))
    async with running([[HALF[0], gone], [gone]], [[gone]]) as fleet:
        await fleet.gateways[1].stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await heard(fleet, request, **settings)
    assert fleet.gateways[0].cancelled == ([] if detached else [ID])


async def test_a_deadline_that_a_gateway_may_not_have_noticed_cancels_the_job() -> None:
    async with running([[HALF[0], Hang()]]) as fleet:
        assert (await error_of(fleet, timeout=0.2)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert fleet.gateways[0].cancelled == [ID]


@pytest.mark.parametrize("refusal", [FULL, Fail(grpc.StatusCode.INVALID_ARGUMENT)])
async def test_what_was_refused_needs_no_cancelling(refusal: Fail) -> None:
    async with running([[refusal]]) as fleet:
        await error_of(fleet, accept_s=0.0)
    assert fleet.gateways[0].cancelled == []


@pytest.mark.parametrize(
    ("trailing", "seconds"),
    [
        ((), None),
        ((("retry-after-ms", "1500"),), 1.5),
        ((("retry-after-ms", "-5"),), 0.0),
        ((("retry-after-ms", "soon"),), None),
        ((("x", "1"), ("retry-after-ms", "0")), 0.0),
    ],
)
def test_what_a_gateway_says_of_when_to_come_back(trailing: tuple[tuple[str, str], ...], seconds: float | None) -> None:
    error = grpc.aio.AioRpcError(UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing))
    assert retry_after(error) == seconds
