"""Reading what somebody else has asked for, over several gateways."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from gateway import asking
from gateway.client import BrokenStream, Client
from octavo.v1.inference_pb2 import CANCELLED, STOP, Chunk, GenerateResponse
from tests.unit.gateway.scripted_gateway import (
    HALF,
    ID,
    REST,
    UNAVAILABLE,
    WHOLE,
    Die,
    Fail,
    Fleet,
    Hang,
    running,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


pytestmark = pytest.mark.usefixtures("short_pauses")


async def read(
    fleet: Fleet, after: Mapping[int, int] | None = None, *, watch: bool = True, **settings: float
) -> list[GenerateResponse]:
    async with Client(fleet.targets, **settings) as client:
        return [response async for response in client.attach(ID, after=after, watch=watch)]


def first(response: GenerateResponse, choices: int = 1) -> GenerateResponse:
    """The response as the first one of an Attach."""
    told_first = GenerateResponse(choices=choices)
    told_first.MergeFrom(response)
    return told_first


async def test_a_reader_that_loses_its_gateway_goes_on_at_the_next() -> None:
    async with running([[first(HALF[0]), HALF[1], Die()]], [[first(REST[0]), REST[1]]]) as fleet:
        responses = await read(fleet)
    assert told(responses) == WHOLE
    assert [each.choices for each in responses] == [1, 0, 0, 0]
    assert fleet.verbs == [["Attach"], ["Attach"]]
    assert [dict(each.calls[0].request.after) for each in fleet.gateways] == [{}, {0: 2}]


async def test_it_begins_where_its_reader_is_and_knows_all_choices() -> None:
    other = GenerateResponse(chunks=[Chunk(choice=1, token_ids=[20], text="x", finish=STOP)])
    async with running([[first(REST[0], 2), Fail(UNAVAILABLE)], [first(other, 2), REST[1]]]) as fleet:
        responses = await read(fleet, {0: 2})
    chunks = [chunk for each in responses for chunk in each.chunks]
    assert [(each.choice, each.start, list(each.token_ids)) for each in chunks] == [
        (0, 2, [12]),
        (1, 0, [20]),
        (0, 3, [13]),
    ]
    assert [dict(call.request.after) for call in fleet.gateways[0].calls] == [{0: 2}, {0: 3}]


@pytest.mark.parametrize("before", [[], [first(HALF[0]), Fail(UNAVAILABLE)]])
async def test_what_nobody_knows_is_not_asked_for_again(before: list[GenerateResponse | Fail]) -> None:
    """Its payload is not known here."""
    unknown = Fail(grpc.StatusCode.NOT_FOUND, "job 'r1' is unknown")
    async with running(*([[before, [unknown]]] if before else [[[unknown]]])) as fleet:
        with pytest.raises(grpc.aio.AioRpcError, match="is unknown"):
            await read(fleet)
    assert set(fleet.gateways[0].verbs) == {"Attach"}
    assert fleet.gateways[0].cancelled == []


async def test_a_cancelled_job_stays_cancelled() -> None:
    """Also where it was a gateway that lost a connection: its payload is not known here."""
    last = Chunk(start=2, finish=CANCELLED, abandoned=True)
    end = GenerateResponse(choices=1, chunks=[last], usage={"completion_tokens": 2})
    async with running([[first(HALF[0]), HALF[1], Die()]], [[end]]) as fleet:
        assert told(await read(fleet)) == ([10, 11], "ab", ["CANCELLED"])


@pytest.mark.parametrize("watch", [True, False])
async def test_who_only_looks_on_cancels_nothing_when_it_gives_up(watch: bool) -> None:
    async with running([[first(HALF[0]), Fail(UNAVAILABLE)]]) as fleet:
        with pytest.raises(grpc.aio.AioRpcError, match="because"):
            await read(fleet, watch=watch, patience_s=0.0)
    assert (fleet.verbs, fleet.gateways[0].cancelled) == ([["Attach"]], [] if watch else [ID])
    assert fleet.gateways[0].calls[0].request.watch is watch


@pytest.mark.parametrize("watch", [True, False])
async def test_nor_when_it_leaves_between_two_calls(monkeypatch: pytest.MonkeyPatch, watch: bool) -> None:
    resting = asyncio.Event()

    def rest(*_: object) -> float:
        resting.set()
        return 50.0

    monkeypatch.setattr(asking.Attaching, "after", rest)
    async with running([[Fail(UNAVAILABLE)]]) as fleet, Client(fleet.targets) as client:
        reading = asyncio.ensure_future(anext(client.attach(ID, watch=watch)))
        await resting.wait()
        reading.cancel()
        await asyncio.wait([reading])
    assert fleet.gateways[0].cancelled == ([] if watch else [ID])


async def test_a_call_that_ends_without_an_end_is_broken() -> None:
    async with running([[first(HALF[0])]]) as fleet:
        with pytest.raises(BrokenStream, match="without a terminal chunk of choice 0"):
            await read(fleet)
    async with running([[]]) as fleet:
        with pytest.raises(BrokenStream, match="did not say how many choices"):
            await read(fleet)
    async with running([[HALF[0], Hang()]]) as fleet:
        with pytest.raises(BrokenStream, match="a chunk of choice 0, of no number"):
            await read(fleet)
