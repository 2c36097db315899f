"""The load that the runner makes, seen by a server in this process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from bench.runner import measure, warm_up
from octavo.v1 import inference_pb2, inference_pb2_grpc
from ops.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Echo(inference_pb2_grpc.InferenceServicer):
    """Answers with as many tokens as asked for, all calls of a full house together; refuses the text `refuse`."""

    def __init__(self) -> None:
        self.house = 1
        self.open = 0
        self.most = 0
        self.served = 0
        self._full = asyncio.Event()

    async def Generate(  # noqa: N802 - the service's name
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if request.text == "refuse":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        self.open += 1
        self.served += 1
        self.most = max(self.most, self.open)
        if self.open == self.house:
            self._full.set()
        await self._full.wait()
        count = request.stopping.max_tokens
        for index in range(count):
            finish = inference_pb2.LENGTH if index == count - 1 else inference_pb2.FINISH_REASON_UNSPECIFIED
            chunk = inference_pb2.Chunk(start=index, token_ids=[index], text="x", finish=finish)
            response = inference_pb2.GenerateResponse(chunks=[chunk])
            if finish:
                response.usage.prompt_tokens = len(request.text)
                response.usage.cached_tokens = 1
            yield response
        self.open -= 1


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, Client]]:
    server, servicer = grpc.aio.server(), Echo()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        yield servicer, client
    await server.stop(None)


def asks(count: int, tokens: int = 3, text: str = "abcd") -> list[inference_pb2.GenerateRequest]:
    stopping = inference_pb2.Stopping(max_tokens=tokens)
    return [inference_pb2.GenerateRequest(text=text, stopping=stopping) for _ in range(count)]


async def test_as_many_run_at_once_as_asked_for_and_never_more(echo: tuple[Echo, Client]) -> None:
    servicer, client = echo
    servicer.house = 4
    level, samples = await measure(client, asks(10), concurrency=4)
    assert (servicer.most, servicer.served) == (4, 10)
    assert (level.concurrency, level.requests, level.errors) == (4, 10, {})
    assert (level.prompt_tokens, level.cached_tokens, level.output_tokens) == (40, 10, 30)
    assert all(s.first_token_s is not None and s.first_token_s <= s.total_s for s in samples)


async def test_samples_come_in_the_order_of_the_requests(echo: tuple[Echo, Client]) -> None:
    _, client = echo
    requests = [request for tokens in (5, 1, 2) for request in asks(1, tokens)]
    _, samples = await measure(client, requests, concurrency=1)
    assert [sample.output_tokens for sample in samples] == [5, 1, 2]
    assert [sample.seconds_per_token is None for sample in samples] == [False, True, False]


async def test_failures_are_counted_and_the_run_goes_on(echo: tuple[Echo, Client]) -> None:
    _, client = echo
    level, samples = await measure(client, [*asks(2, text="refuse"), *asks(1)], concurrency=1)
    assert level.errors == {"RESOURCE_EXHAUSTED: full": 2}
    assert [bool(sample.error) for sample in samples] == [True, True, False]
    assert level.output_tokens == 3


async def test_a_warm_up_that_fails_stops_the_run(echo: tuple[Echo, Client]) -> None:
    servicer, client = echo
    servicer.house = 3
    await warm_up(client, asks(3))
    assert servicer.most == 3
    with pytest.raises(grpc.aio.AioRpcError, match="full"):
        await warm_up(client, asks(1, text="refuse"))
