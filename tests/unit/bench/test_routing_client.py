"""The open loop, seen by a server in this process."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from bench.routing_client import rate_of, saturate, send
from bench.routing_figures import ANSWERED, FAILED, REFUSED, UNANSWERED
from bench.routing_load import Ask
from octavo.v1 import inference_pb2, inference_pb2_grpc
from ops.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HANG, REFUSE, BREAK, STALL = 1, 2, 3, 4
"""First tokens of prompts that don't simply get their answers."""


class Server(inference_pb2_grpc.InferenceServicer):
    """Answers with as many tokens as asked for; what it does with a prompt is said by the first token."""

    def __init__(self) -> None:
        self.most = 0
        self.salts: set[str] = set()
        self.called, self.cancelled = asyncio.Event(), asyncio.Event()
        self._open = 0

    async def Generate(  # noqa: N802 - the service's name
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        kind = request.token_ids.ids[0]
        self.salts.add(request.cache_salt)
        self.called.set()
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            if kind == REFUSE:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            if kind == BREAK:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if kind == HANG:
                await asyncio.Event().wait()
            for index in range(request.stopping.max_tokens):
                yield response(index, request)
                if kind == STALL:
                    await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self._open -= 1


def response(index: int, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
    last = index == request.stopping.max_tokens - 1
    finish = inference_pb2.LENGTH if last else inference_pb2.FINISH_REASON_UNSPECIFIED
    made = inference_pb2.GenerateResponse(chunks=[inference_pb2.Chunk(start=index, token_ids=[7], finish=finish)])
    if index == 0:
        made.route.worker, made.route.predicted_cached_tokens, made.route.cached_tokens = "w3", 32, 16
    return made


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Server, Client]]:
    server, servicer = grpc.aio.server(), Server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        yield servicer, client
    await server.stop(None)


def ask(due_s: float, kind: int = 9, output: int = 3) -> Ask:
    return Ask(due_s, 0, (kind, 8, 8, 8), output)


async def test_a_request_is_sent_when_it_is_due_and_waits_for_none(pair: tuple[Server, Client]) -> None:
    server, client = pair
    asks = [ask(0.0, HANG), ask(0.05, HANG), ask(0.1), ask(0.15)]
    sent = await send(client, asks, salt="s", seconds=0.2, drain_s=0.2)
    assert [each.outcome for each in sent.samples] == [UNANSWERED, UNANSWERED, ANSWERED, ANSWERED]
    assert [each.due_s for each in sent.samples] == [0.0, 0.05, 0.1, 0.15]
    assert all(0 <= each.lag_s < 5 for each in sent.samples)
    assert server.most >= 2
    assert server.salts == {"s"}
    assert sent.wall_s >= 0.4


async def test_what_a_user_saw(pair: tuple[Server, Client]) -> None:
    _, client = pair
    [sample] = (await send(client, [ask(0.0, output=4)], salt="", seconds=0.1, drain_s=5.0)).samples
    assert (sample.prompt_tokens, sample.worker, sample.cached_tokens, sample.predicted_tokens) == (4, "w3", 16, 32)
    assert sum(tokens for _, tokens in sample.tokens) == 4
    assert sample.first_token_s is not None
    # Two readings of the clock for the same response.
    assert sample.first_token_s == pytest.approx(sample.tokens[0][0], abs=0.05)
    assert sample.tokens[-1][0] <= sample.waited_s


async def test_a_run_ends_as_soon_as_all_is_answered(pair: tuple[Server, Client]) -> None:
    _, client = pair
    sent = await send(client, [ask(0.0)], salt="", seconds=0.05, drain_s=1000.0)
    assert sent.samples[0].outcome == ANSWERED
    assert (await send(client, [], salt="", seconds=0.01, drain_s=1000.0)).samples == []


async def test_failures_are_samples_too(pair: tuple[Server, Client]) -> None:
    server, client = pair
    asks = [ask(0.0, REFUSE), ask(0.0, BREAK), ask(0.0, STALL)]
    samples = (await send(client, asks, salt="", seconds=0.1, drain_s=0.3)).samples
    assert [each.outcome for each in samples] == [REFUSED, FAILED, UNANSWERED]
    assert [each.error for each in samples[:2]] == ["RESOURCE_EXHAUSTED: full", "UNAVAILABLE: gone"]
    # The third had its first token and was given up in the middle of its answer.
    assert samples[2].first_token_s is not None
    assert samples[2].worker == "w3"
    assert samples[2].waited_s >= 0.3
    await asyncio.wait_for(server.cancelled.wait(), 10)


async def test_an_interrupted_run_leaves_no_call_behind(pair: tuple[Server, Client]) -> None:
    server, client = pair
    run = asyncio.create_task(send(client, [ask(0.0, HANG), ask(900.0)], salt="", seconds=1000, drain_s=0))
    await asyncio.wait_for(server.called.wait(), 10)
    run.cancel()
    await asyncio.wait_for(server.cancelled.wait(), 10)
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_places_are_always_taken_until_time_is_over(pair: tuple[Server, Client]) -> None:
    server, client = pair
    stuck = await saturate(client, (ask(0.0, HANG) for _ in count()), salt="s", places=3, seconds=1.0)
    assert (stuck.ends, stuck.errors, server.most, server.salts) == ([], {}, 3, {"s"})
    await asyncio.wait_for(server.cancelled.wait(), 10)
    done = await saturate(client, (ask(0.0) for _ in count()), salt="", places=3, seconds=1.0)
    assert done.ends == sorted(done.ends)
    assert len(done.ends) > 0
    assert done.ends[-1] < 5


async def test_it_goes_on_until_enough_has_come_or_no_longer_may(pair: tuple[Server, Client]) -> None:
    _, client = pair
    done = await saturate(client, (ask(0.0) for _ in count()), salt="", places=3, seconds=0.0, answers=7, most_s=60.0)
    assert 7 <= len(done.ends) <= 9
    stuck = await saturate(client, (ask(0.0, HANG) for _ in count()), salt="", places=3, seconds=0, answers=1, most_s=1)
    assert stuck.ends == []


async def test_failures_of_a_closed_loop_are_counted(pair: tuple[Server, Client]) -> None:
    _, client = pair
    few = (ask(0.0, kind) for kind in (BREAK, 9, BREAK, REFUSE))
    done = await saturate(client, few, salt="", places=2, seconds=1000.0)
    assert done.errors == {"UNAVAILABLE: gone": 2, "RESOURCE_EXHAUSTED: full": 1}
    assert len(done.ends) == 1


def test_a_rate_is_that_of_what_follows_on_the_first() -> None:
    assert rate_of([4.9, 5.0, 6.0, 9.0, 10.0], places=2) == 3 / 5
    assert rate_of([4.0, 5.0], places=2) == 2 / 5
    assert rate_of([], places=2) == 0.0
