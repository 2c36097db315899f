"""The client that goes on elsewhere, on two real gateways and a worker with a tiny model."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from gateway import client
from gateway.client import Client
from octavo.v1.inference_pb2 import CANCELLED, GenerateRequest, Sampling, Stopping, TokenIds
from ops.answer import Answer
from tests.integration.conftest import names
from tests.integration.gateway.harness import running_gateway
from tests.integration.kvstore.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvstore.client import Broker
    from tests.integration.worker.one_worker import Fleet
    from worker.step import StepOutput

TOKENS = 60


def request(name: str, *, n: int = 1, seed: int | None = None) -> GenerateRequest:
    sampling = Sampling(temperature=0.0) if seed is None else Sampling(temperature=1.0, seed=seed)
    stopping = Stopping(max_tokens=TOKENS, ignore_eos=True)
    ids = TokenIds(ids=range(5, 12))
    return GenerateRequest(request_id=name, token_ids=ids, sampling=sampling, stopping=stopping, n=n)


@pytest.fixture
def slowly(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes its time, so that there is something left to lose."""
    step = fleet.worker.engine.step

    def slow_step() -> StepOutput:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(fleet.worker.engine, "step", slow_step)


class Two:
    """Two gateways, the first one behind a proxy, and a client of both."""

    def __init__(self, proxy: Proxy, first: AsyncExitStack, client: Client) -> None:
        self.proxy = proxy
        self.first = first
        """Closing it stops the first gateway."""
        self.client = client

    async def ask(
        self, asked: GenerateRequest, after: int = 0, fault: Callable[[], Awaitable[None]] | None = None
    ) -> Answer:
        """The whole answer, checked as it comes; `fault` happens after so many tokens."""
        answer = Answer(n=max(asked.n, 1))
        async for response in self.client.generate(asked, timeout=40):
            answer.add(response, time.monotonic())
            if fault is not None and sum(len(each.token_ids) for each in answer.choices) >= after:
                await fault()
                fault = None
        answer.end(time.monotonic())
        assert fault is None
        return answer


@pytest.fixture
async def two(broker: Broker, fleet: Fleet) -> AsyncIterator[Two]:
    async with AsyncExitStack() as first, running_gateway(broker) as (_, other, _):
        _, ready, _ = await first.enter_async_context(running_gateway(broker))
        async with (
            Proxy(f"tcp://{ready.grpc}") as proxy,
            Client([proxy.url.removeprefix("redis://").removesuffix("/0"), other.grpc]) as both,
        ):
            yield Two(proxy, first, both)


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", [None, 7])
async def test_a_connection_that_breaks_costs_no_token(two: Two, fleet: Fleet, n: int, seed: int | None) -> None:
    """Its gateway lives, and takes that for a caller who left: the job may be cancelled, the answer is not."""
    whole = await two.ask(request("whole", n=n, seed=seed))

    async def cut() -> None:
        two.proxy.cut()

    answer = await two.ask(request("cut", n=n, seed=seed), 5 * n, cut)
    assert [each.token_ids for each in answer.choices] == [each.token_ids for each in whole.choices]
    assert [each.text for each in answer.choices] == [each.text for each in whole.choices]
    assert {(each.finish, len(each.token_ids)) for each in answer.choices} == {("LENGTH", TOKENS)}
    assert answer.request_id == "cut"
    await fleet.idle()


@pytest.mark.usefixtures("slowly")
async def test_a_gateway_that_stops_hands_its_callers_on(two: Two, fleet: Fleet) -> None:
    whole = await two.ask(request("whole"))
    stopping: list[asyncio.Task[None]] = []

    async def stop() -> None:
        stopping.append(asyncio.create_task(two.first.aclose()))

    answer = await two.ask(request("handed-on"), 5, stop)
    await asyncio.gather(*stopping)
    assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
    log = await fleet.ended("handed-on")
    assert [delivery.chunk.finish for delivery in log if delivery.chunk.finish == CANCELLED] == []
    assert [delivery.chunk.start for delivery in log] == list(range(TOKENS))


@pytest.mark.usefixtures("slowly")
async def test_what_the_broker_forgot_with_all_else_is_asked_for_again(two: Two, fleet: Fleet, broker: Broker) -> None:
    """The next gateway knows neither the job nor, for a moment, a worker."""
    whole = await two.ask(request("whole"))

    async def forget() -> None:
        two.proxy.cut()
        await broker.call("DEL", *await names(broker))

    answer = await two.ask(request("forgotten"), 5, forget)
    assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
    await fleet.idle()


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second instead of every ten."""
    shorter = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 800, "grpc.http2.ping_timeout_ms": 800}
    monkeypatch.setattr(client, "OPTIONS", tuple((name, shorter.get(name, value)) for name, value in client.OPTIONS))


@pytest.mark.usefixtures("slowly")
async def test_a_gateway_that_stands_still_is_left(pings: None, two: Two, fleet: Fleet) -> None:
    """Its connections stay open, and nothing comes."""
    whole = await two.ask(request("whole"))

    async def freeze() -> None:
        two.proxy.freeze()

    answer = await two.ask(request("held"), 5, freeze)
    assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
    two.proxy.release()
    await fleet.idle()
    log = await fleet.ended("held")
    assert [delivery.attempt for delivery in log] == [1] * TOKENS
