"""Callers who go away, and callers who bring a lot: the others notice nothing, and nothing is left behind.

Comments such as G14 name the public fault reports of other servers that a test guards against.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from gateway.tokenize import ModelTokenizer
from octavo.v1.inference_pb2 import CANCELLED, GenerateRequest, Sampling, Stopping, TokenIds
from ops.client import Client
from tests.integration.kvstore.proxy import Proxy

if TYPE_CHECKING:
    from tests.integration.worker.one_worker import Fleet
    from worker.step import StepOutput


def request(name: str, *, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        token_ids=TokenIds(ids=range(5, 12)),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
    )


@pytest.mark.parametrize("n", [1, 3])
async def test_a_connection_that_breaks_stops_the_work(
    client: Client, target: str, fleet: Fleet, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G14: after a few tokens of many, without a word. Its blocks come back, and the next request is served."""
    first = (await client.generate(request("first", max_tokens=40), timeout=20)).token_ids
    step = fleet.worker.engine.step

    def slow_step() -> StepOutput:
        time.sleep(0.01)  # a model that takes its time, so that there is work left to stop
        return step()

    async with Proxy(f"tcp://{target}") as proxy, Client(proxy.url.removeprefix("redis://").removesuffix("/0")) as far:

        async def read_a_little() -> None:
            asked, got = request("left", max_tokens=480), 0
            asked.n = n
            async for response in far.responses(asked, timeout=20):
                got += sum(len(chunk.token_ids) for chunk in response.chunks)
                if got >= 5:
                    proxy.cut()

        with monkeypatch.context() as slow:
            slow.setattr(fleet.worker.engine, "step", slow_step)
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await read_a_little()
            log = await fleet.ended("left")
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    await fleet.idle()
    assert [delivery.chunk.finish for delivery in log if delivery.chunk.finish] == [CANCELLED]
    assert sum(len(delivery.chunk.token_ids) for delivery in log) < 480 * n
    assert (await client.generate(request("next", max_tokens=40), timeout=20)).token_ids == first
    assert [(queue.undelivered, queue.pending) for queue in await client.queues()] == [(0, 0)]


async def test_tiny_requests_pass_prompts_that_are_being_tokenized(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B10: eight prompts of nearly the context stand in the tokenizer's threads until twenty tiny ones are served."""
    gate, entered = threading.Event(), threading.Semaphore(0)
    encode = ModelTokenizer.encode_text

    def gated(self: ModelTokenizer, text: str) -> list[int]:
        entered.release()
        assert gate.wait(20), "the event loop stands still"
        return encode(self, text)

    monkeypatch.setattr(ModelTokenizer, "encode_text", gated)
    stopping = Stopping(max_tokens=1, ignore_eos=True)
    long = GenerateRequest(text="a book " * 165, sampling=Sampling(temperature=0.0), stopping=stopping)
    waiting = [asyncio.create_task(client.generate(long, timeout=30)) for _ in range(8)]
    for _ in range(2):
        assert await asyncio.to_thread(entered.acquire, timeout=20)
    for index in range(20):
        answer = await client.generate(request(f"tiny{index}", max_tokens=2), timeout=20)
        assert (answer.finish, len(answer.token_ids)) == ("LENGTH", 2)
    assert not any(task.done() for task in waiting)
    gate.set()
    answers = await asyncio.gather(*waiting)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert {answer.usage.prompt_tokens == 495 for answer in answers if answer.usage} == {True}
