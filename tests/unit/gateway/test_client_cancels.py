"""Who has cancelled a job that the client goes on with elsewhere: its caller, or a gateway that lost a connection."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from gateway import client as module
from gateway.client import BrokenStream, Client
from octavo.v1.inference_pb2 import CANCELLED, Chunk, GenerateResponse
from tests.unit.gateway.scripted_gateway import (
    HALF,
    ID,
    REQUEST,
    REST,
    UNAVAILABLE,
    WHOLE,
    Accept,
    Act,
    Die,
    Fail,
    Fleet,
    Hang,
    UntilCancelled,
    heard,
    running,
    said,
    told,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


async def test_cancel_asks_the_next_gateway_too() -> None:
    async with running([[Hang()]], [[Hang()]]) as fleet:
        await fleet.gateways[0].stop()
        async with Client(fleet.targets) as client:
            assert await client.cancel("x")
            await fleet.gateways[1].stop()
            with pytest.raises(grpc.aio.AioRpcError):
                await client.cancel("x")
    assert fleet.gateways[1].cancelled == ["x"]


@pytest.mark.parametrize("trouble", [Hang(), Fail(UNAVAILABLE), Fail(grpc.StatusCode.INTERNAL, "internal error 1f")])
async def test_a_gateway_that_stands_still_or_is_in_trouble_keeps_nobody_from_cancelling(
    monkeypatch: pytest.MonkeyPatch, trouble: Fail | Hang
) -> None:
    monkeypatch.setattr(module, "CANCEL_S", 1.0)
    async with running([[Hang()]], [[Hang()]]) as fleet, Client(fleet.targets) as client:
        fleet.gateways[0].at_cancel = trouble
        assert await client.cancel("x")
        assert await client.cancel("y")
    assert (fleet.gateways[0].cancelled, fleet.gateways[1].cancelled) == (["x"], ["x", "y"])


async def test_what_is_wrong_with_a_cancel_itself_is_wrong_everywhere() -> None:
    async with running([[Hang()]], [[Hang()]]) as fleet, Client(fleet.targets) as client:
        fleet.gateways[0].at_cancel = Fail(grpc.StatusCode.INVALID_ARGUMENT, "request_id is ''")
        with pytest.raises(grpc.aio.AioRpcError, match="request_id is"):
            await client.cancel("")
    assert fleet.gateways[1].cancelled == []


@pytest.mark.parametrize(("still", "known"), [([0], True), ([0, 1], False)])
async def test_who_gives_up_tells_the_gateways_that_do_not_stand_still(
    monkeypatch: pytest.MonkeyPatch, still: list[int], known: bool
) -> None:
    """And says whether one has heard it."""
    monkeypatch.setattr(module, "CANCEL_S", 0.2)
    heard_of: list[tuple[str, bool]] = []
    gone: list[Act] = [HALF[0], Fail(UNAVAILABLE)]
    async with running([gone, [Fail(UNAVAILABLE)]], [[Fail(UNAVAILABLE)]]) as fleet:
        for each in still:
            fleet.gateways[each].at_cancel = Hang()
        with pytest.raises(grpc.aio.AioRpcError):
            await heard(fleet, patience_s=0.0, on_farewell=lambda *about: heard_of.append(about))
    assert heard_of == [(ID, known)]


CANCEL = GenerateResponse(chunks=[Chunk(start=2, finish=CANCELLED)], usage={"completion_tokens": 2})
ABANDONED = GenerateResponse(chunks=[Chunk(start=2, finish=CANCELLED, abandoned=True)], usage={"completion_tokens": 2})


async def test_a_gateway_that_took_a_broken_connection_for_a_leaving_caller_has_cancelled_nothing() -> None:
    """The same request becomes a job of another id; the caller notices nothing of that."""
    async with running([[*HALF, Die()]], [[ABANDONED], [*HALF, *REST]]) as fleet:
        responses = await heard(fleet)
    assert told(responses) == WHOLE
    assert {each.request_id for each in responses} == {ID}
    assert [each.usage.completion_tokens for each in responses if each.HasField("usage")] == [4]
    first, (_, second) = fleet.gateways[0].calls[0].request, fleet.gateways[1].calls
    assert (fleet.verbs[1], second.request.request_id != ID) == (["Attach", "Generate"], True)
    second.request.request_id = ID
    assert second.request == first


DRAINING = Fail(UNAVAILABLE, "the gateway is stopping", (("retry-after-ms", "1"),))


@pytest.mark.parametrize("cut", [DRAINING, Die()])
async def test_who_cancels_a_job_elsewhere_has_cancelled_it(cut: Act) -> None:
    """Also right after a connection broke."""
    async with running([[*HALF, cut]], [[CANCEL]]) as fleet:
        responses = await heard(fleet)
    assert told(responses) == ([10, 11], "ab", ["CANCELLED"])
    assert [each.usage.completion_tokens for each in responses if each.HasField("usage")] == [2]
    assert fleet.verbs == [["Generate"], ["Attach"]]


@pytest.mark.parametrize(("before", "verb"), [([], "Generate"), ([Accept()], "Attach")])
async def test_a_job_may_have_been_abandoned_before_its_client_heard_of_it(before: list[Act], verb: str) -> None:
    """Its gateway had taken the call, or was about to, when the connection broke."""
    abandoned = GenerateResponse(chunks=[Chunk(finish=CANCELLED, abandoned=True)])
    async with running([[*before, Die()]], [[abandoned], [*HALF, *REST]]) as fleet:
        assert told(await heard(fleet)) == WHOLE
    assert fleet.verbs == [["Generate"], [verb, "Generate"]]


async def test_who_asks_again_for_what_it_gave_up_gets_it() -> None:
    """Or for what another one gave up who had asked for the same."""
    scripts: list[list[Act]] = [[HALF[0], Fail(UNAVAILABLE)], [ABANDONED], [*HALF, *REST]]
    async with running(scripts) as fleet, Client(fleet.targets, patience_s=0.0) as client:
        with pytest.raises(grpc.aio.AioRpcError):
            [each async for each in client.generate(REQUEST)]
        assert told([each async for each in client.generate(REQUEST)]) == WHOLE
    first, again, anew = fleet.gateways[0].calls
    assert [each.request.request_id == ID for each in (first, again, anew)] == [True, True, False]
    # Who leaves is named by its calls, and no one else is.
    assert fleet.gateways[0].leavers == [first.caller]
    assert len({first.caller, again.caller, ""}) == 3
    assert anew.caller == again.caller


async def test_all_calls_for_one_request_name_one_caller() -> None:
    async with running([[*HALF, Fail(UNAVAILABLE)], [Fail(UNAVAILABLE)], REST]) as fleet:
        await heard(fleet)
    callers = [each.caller for each in fleet.gateways[0].calls]
    assert callers == [callers[0]] * 3
    assert callers[0]


async def cancelled_meanwhile(fleet: Fleet) -> list[GenerateResponse]:
    """All that comes of a request that its client cancels once the last gateway waits for that."""
    async with Client(fleet.targets) as client:

        async def all_of_it() -> list[GenerateResponse]:
            return [each async for each in client.generate(REQUEST)]

        answer = asyncio.create_task(all_of_it())
        await fleet.gateways[-1].hanging.wait()
        assert await client.cancel(ID)
        return await answer


async def test_what_this_client_cancels_is_not_brought_back() -> None:
    """Though a gateway may have taken it for gone before."""
    async with running([[*HALF, Die()]], [[UntilCancelled(), ABANDONED]]) as fleet:
        assert told(await cancelled_meanwhile(fleet)) == ([10, 11], "ab", ["CANCELLED"])
    assert (fleet.verbs, set(fleet.gateways[1].cancelled)) == ([["Generate"], ["Attach"]], {ID})


@pytest.mark.parametrize("first", [[[*HALF, Die()]], []])
async def test_what_is_cancelled_on_its_way_ends_once_it_is_accepted(first: list[list[Act]]) -> None:
    """Who was told to cancel it did not know it yet."""
    end = CANCEL if first else GenerateResponse(chunks=[Chunk(finish=CANCELLED)])
    async with running(*([first] if first else []), [[UntilCancelled(), Accept(), end]]) as fleet:
        assert told(await cancelled_meanwhile(fleet))[2] == ["CANCELLED"]
    assert (fleet.gateways[-1].cancelled, fleet.gateways[-1].leavers) == ([ID, ID], ["", ""])


@pytest.mark.parametrize("code", [grpc.StatusCode.DEADLINE_EXCEEDED, UNAVAILABLE])
async def test_what_can_not_be_cancelled_once_it_is_accepted_is_left(code: grpc.StatusCode) -> None:
    """What is wrong with the cancelling is not wrong with the job: no deadline of its own has passed."""
    async with running([[UntilCancelled(), Accept(), Hang()]]) as fleet, Client(fleet.targets) as client:
        fleet.gateways[0].at_cancel = Fail(code)
        answer = asyncio.ensure_future(anext(client.generate(REQUEST)))
        await fleet.gateways[0].hanging.wait()
        with pytest.raises(grpc.aio.AioRpcError):
            await client.cancel(ID)
        with pytest.raises(grpc.aio.AioRpcError, match="the request was cancelled") as cancelled:
            await answer
        assert cancelled.value.code() is grpc.StatusCode.CANCELLED
        await fleet.gateways[0].left.wait()
    assert (fleet.verbs, fleet.gateways[0].cancelled) == ([["Generate"]], [ID, ID])


async def test_what_was_brought_back_is_cancelled_by_the_name_that_its_caller_knows() -> None:
    async with running([[*HALF, Die()]], [[ABANDONED], [*HALF, UntilCancelled(), CANCEL]]) as fleet:
        assert told(await cancelled_meanwhile(fleet)) == ([10, 11], "ab", ["CANCELLED"])
    _, again = fleet.gateways[1].calls
    assert again.request.request_id != ID
    # Once more if its acceptance came after the first cancellation.
    assert set(fleet.gateways[1].cancelled) == {again.request.request_id}


async def test_what_was_cancelled_and_lost_is_not_asked_for_again() -> None:
    lost = Fail(grpc.StatusCode.NOT_FOUND)
    async with running([[*HALF, Fail(UNAVAILABLE)]], [[UntilCancelled(), lost], [*HALF, *REST]]) as fleet:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cancelled_meanwhile(fleet)
    assert failed.value.code() is grpc.StatusCode.CANCELLED
    assert fleet.verbs == [["Generate"], ["Attach"]]


@pytest.mark.parametrize(
    ("first", "second"), [(Die(), [[ABANDONED]]), (Fail(UNAVAILABLE), [[Fail(grpc.StatusCode.NOT_FOUND)]])]
)
async def test_an_answer_is_of_one_run_only(first: Act, second: list[list[Act]]) -> None:
    """Asked for under another id, or again under the same one."""
    other: list[Act] = [said(0, 10, text="a"), said(1, 99, text="b"), *REST]
    async with running([[*HALF, first]], [*second, other]) as fleet:
        with pytest.raises(BrokenStream, match="choice 0: token 1 is 99 and was 11 before"):
            await heard(fleet)
    assert fleet.verbs == [["Generate"], ["Attach", "Generate"]]
