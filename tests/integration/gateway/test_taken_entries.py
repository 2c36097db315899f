"""Entries taken from a worker's stream by hand, and streams that are none any more: callers get their answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from gateway import stream
from tests.integration.gateway.harness import collect, failure, fleet, request, tokens
from tests.integration.gateway.scripted import ScriptedWorker

if TYPE_CHECKING:
    from kvstore.client import Broker
    from tests.integration.gateway.harness import Client

Code = grpc.StatusCode


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LISTED_S", 0.1)
    monkeypatch.setattr(stream, "SILENCE_S", 0.1)


async def test_a_caller_whose_jobs_entry_is_gone(worker: ScriptedWorker, client: Client, broker: Broker) -> None:
    call = client.generate(request("r1"))
    await call.initial_metadata()
    await broker.call("DEL", broker.keys.jobs("w0"))
    worker.serve()
    responses = await asyncio.wait_for(collect(call), 5)
    assert (tokens(responses), responses[-1].usage.attempts) == ([2, 3, 4], 1)


async def test_a_stream_that_is_none_is_told_at_once_and_others_are_served(broker: Broker) -> None:
    worker, other = ScriptedWorker(broker), ScriptedWorker(broker, "w1")
    key = broker.keys.jobs("w0")
    async with fleet(broker, worker) as client:
        waits = client.generate(request("waits"))
        await waits.initial_metadata()
        await broker.call("SET", key, "junk")
        named = f"in the broker key {key} is of another type than is written there; whoever runs this must delete it"
        assert await asyncio.wait_for(failure(waits), 5) == (Code.UNAVAILABLE, named)
        assert await asyncio.wait_for(failure(client.generate(request("new"))), 5) == (Code.UNAVAILABLE, named)
        await other.start()
        other.serve()
        # Its keys say nothing of its load, so it seems to be the better one each time.
        for number in range(8):
            assert tokens(await asyncio.wait_for(collect(client.generate(request(f"r{number}"))), 5)) == [2, 3, 4]
        # Whoever asks again once the key is deleted gets the answer to what was accepted.
        again = client.generate(request("waits"))
        await broker.call("DEL", key)
        worker.serve()
        assert tokens(await asyncio.wait_for(collect(again), 5)) == [2, 3, 4]
        await other.stop()
