"""Fleets of simulated workers: many on one machine, with everything real but the model."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from typing import TYPE_CHECKING

import pytest

from octavo.v1 import inference_pb2
from ops.client import Client, chat_request
from tests.e2e.harness import Stream, Up, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(400)

WORKERS = 8
MODEL = "simulated:4000,10,0.2"


@pytest.fixture(scope="module")
def many() -> Iterator[Up]:
    up = Up.start("--workers", str(WORKERS), "--model", MODEL, "--grace", "5")
    try:
        yield up.until_ready()
    finally:
        status = up.stop()
    assert status == 0, "\n".join(up.said)


@pytest.fixture
def one() -> Iterator[Up]:
    """With a pool in which not even the prompts of all requests have room, and another time for everything."""
    up = Up.start("--model", "simulated:20000,2", "--kv-tokens", "2048", "--max-running", "6", "--grace", "5")
    try:
        yield up.until_ready()
    finally:
        up.stop()


def request_of(seed: int, *, max_tokens: int = 24) -> inference_pb2.GenerateRequest:
    """One of five long beginnings, then something of its own; every third samples."""
    beginning, own = random.Random(seed % 5), random.Random(seed)
    letters = [beginning.randrange(97, 123) for _ in range(400)] + [own.randrange(97, 123) for _ in range(seed)]
    sampling = inference_pb2.Sampling(temperature=float(seed % 3 == 0), seed=seed)
    stopping = inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True)
    return inference_pb2.GenerateRequest(text=bytes(letters).decode(), sampling=sampling, stopping=stopping)


def long_one(seed: int) -> inference_pb2.GenerateRequest:
    """Every fourth with a form, of which there is no whole text in so few tokens."""
    request = request_of(seed, max_tokens=300)
    if seed % 4 == 3:
        request.structure.regex, request.stopping.ignore_eos = "([a-z]{2,7} ){300}", False
    return request


async def tokens_of(client: Client, seeds: range) -> tuple[list[tuple[int, ...]], set[str]]:
    """All at once. The answers, and the workers that gave them."""
    answers = await asyncio.gather(*(client.generate(request_of(seed)) for seed in seeds))
    assert all(len(answer.token_ids) == 24 for answer in answers)
    return [tuple(answer.token_ids) for answer in answers], {str(a.route.worker) for a in answers if a.route}


async def test_many_workers_say_what_one_says(many: Up, one: Up) -> None:
    """Spread over pools or squeezed into one, computed, shared, preempted or computed again: the same tokens."""
    async with Client(many.target) as client:
        spread, workers = await tokens_of(client, range(40))
        assert len(workers) > 1
        again, _ = await tokens_of(client, range(40))
        assert again == spread
    async with Client(one.target) as client:
        assert await tokens_of(client, range(40)) == (spread, {"w0"})
        answer = await client.generate(chat_request([("user", "Tell me something")]))
        assert answer.finish == "STOP"
        assert set(answer.text) <= set("abcdefghijklmnopqrstuvwxyz ")


async def test_kill_9_of_one_of_many_is_noticed_by_no_stream(many: Up) -> None:
    pids = {worker["name"]: int(worker["pid"]) for worker in many.facts["workers"]}
    async with Client(many.target) as client:
        before = {worker.id: worker.incarnation for worker in await client.workers()}
        assert len(before) == WORKERS
        streams = [Stream() for _ in range(24)]
        reading: list[asyncio.Task[None]] = []
        # What has a form begins after it was compiled: without one others could be through by then.
        for formed in (True, False):
            begun = [
                (seed, stream) for seed, stream in enumerate(streams) if long_one(seed).HasField("structure") is formed
            ]
            reading += [asyncio.create_task(stream.read(client, long_one(seed))) for seed, stream in begun]
            await asyncio.gather(*(stream.first.wait() for _, stream in begun))
        victim = streams[0].worker
        os.kill(pids[victim], signal.SIGKILL)
        await asyncio.gather(*reading)

        assert len({stream.worker for stream in streams}) > 1
        asked = (client.generate(long_one(seed)) for seed in range(len(streams)))
        for stream, undisturbed in zip(streams, await asyncio.gather(*asked), strict=True):
            assert (stream.error, stream.answer.finish) == (None, "LENGTH")
            assert stream.answer.usage is not None
            assert stream.answer.usage.attempts == (2 if stream.worker == victim else 1)
            assert stream.answer.token_ids == undisturbed.token_ids
        for stream in streams[3::4]:
            assert re.fullmatch(r"([a-z]{2,7} )+[a-z]{0,7}", stream.answer.text)

        many.until_said(f"{victim} is back")

        async def all_are_there() -> bool:
            return {worker.id for worker in await client.workers()} == set(before)

        await eventually(all_are_there, 10)
        after = {worker.id: worker.incarnation for worker in await client.workers()}
        assert [name for name in before if after[name] != before[name]] == [victim]
        assert all((queue.undelivered, queue.pending) == (0, 0) for queue in await client.queues())
