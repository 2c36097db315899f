"""What the service promises, on a fleet of two workers with the real model."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from octavo.v1 import inference_pb2
from ops.client import Client
from tests.e2e.harness import DTYPE, Stream, eventually

if TYPE_CHECKING:
    from octavo.v1 import fleet_pb2
    from tests.e2e.harness import Up

pytestmark = pytest.mark.timeout(400)

LENGTHS = (20, 31, 32, 33, 47, 64, 65, 100, 127, 128, 129, 150, 200, 255, 256, 300, 400, 511, 640, 900)
OUTPUT_TOKENS = 12
GOES_ON_WITHIN_S = 10.0
"""A stream whose worker was killed: the lease lapses after three seconds; prompt and tokens are computed anew."""
STALLS_S = 8.0
"""The others, which have the machine to share with that, and with a worker that loads."""


def request_of(length: int, seed: int, *, salt: str, max_tokens: int = OUTPUT_TOKENS) -> inference_pb2.GenerateRequest:
    """Random token ids; every fourth request samples, with a seed of its own, the others are greedy."""
    numbers = random.Random(seed)
    sampling = inference_pb2.Sampling(temperature=0.0)
    if seed % 4 == 3:
        sampling = inference_pb2.Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=seed)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[numbers.randrange(300, 49000) for _ in range(length)]),
        sampling=sampling,
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
        cache_salt=salt,
    )


async def idle_workers(client: Client) -> list[fleet_pb2.Worker]:
    """The workers once their heartbeats tell of no work."""

    async def idle() -> bool:
        return not any(each.running or each.waiting or each.blocks_used for each in await client.workers())

    await eventually(idle, 10)
    return await client.workers()


async def test_32_at_once_answer_as_each_does_alone(fleet: Up) -> None:
    """Neighbours, chunked prompts and the cache change no token; and no block is lost."""
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(32)]
    async with Client(fleet.target) as client:
        together = await asyncio.gather(
            *(client.generate(request_of(length, seed, salt="together")) for seed, length in enumerate(lengths))
        )
        assert {answer.route.worker for answer in together if answer.route} == {"w0", "w1"}
        await idle_workers(client)
        for seed, length in enumerate(lengths):
            alone = await client.generate(request_of(length, seed, salt=f"alone {seed}"))
            assert alone.usage is not None
            assert (alone.usage.prompt_tokens, alone.usage.cached_tokens) == (length, 0)
            assert alone.token_ids == together[seed].token_ids, f"request {seed} of {length} tokens"
            assert len(alone.token_ids) == OUTPUT_TOKENS
        for worker in await idle_workers(client):
            assert worker.dtype == DTYPE
            assert worker.blocks_free + worker.blocks_cached == worker.kv_tokens // worker.block_size


async def test_a_repeated_prompt_hits_the_cache_and_answers_the_same(fleet: Up) -> None:
    async with Client(fleet.target) as client:
        first = await client.generate(request_of(200, 1, salt="again"))
        assert first.route is not None
        for _ in range(3):
            again = await client.generate(request_of(200, 1, salt="again"))
            assert again.token_ids == first.token_ids
            assert again.route is not None
            assert (again.route.worker, again.route.cached_tokens) == (first.route.worker, 192)
            assert again.route.predicted_cached_tokens == 192


async def test_kill_9_of_a_worker_is_noticed_by_no_stream(fleet: Up) -> None:
    """Those that it had go on at the other worker, with the tokens that they would have had."""
    pids = {worker["name"]: int(worker["pid"]) for worker in fleet.facts["workers"]}
    async with Client(fleet.target) as client:
        before = {worker.id: worker.incarnation for worker in await client.workers()}
        streams = [Stream() for _ in range(8)]
        reading = [
            asyncio.create_task(stream.read(client, request_of(20, seed, salt="kill", max_tokens=150)))
            for seed, stream in enumerate(streams)
        ]
        await asyncio.gather(*(stream.first.wait() for stream in streams))
        # How they are spread is the router's: one of two equal workers may be taken for the faster one.
        victim = streams[0].worker
        (other,) = {"w0", "w1"} - {victim}
        killed = [stream for stream in streams if stream.worker == victim]
        os.kill(pids[victim], signal.SIGKILL)
        killed_at = time.monotonic()
        await asyncio.gather(*reading)

        again = (request_of(20, seed, salt="again", max_tokens=150) for seed in range(len(streams)))
        undisturbed = await asyncio.gather(*map(client.generate, again))
        for seed, stream in enumerate(streams):
            assert (stream.error, stream.answer.finish, len(stream.answer.token_ids)) == (None, "LENGTH", 150)
            assert stream.answer.usage is not None
            assert stream.answer.usage.attempts == (2 if stream in killed else 1)
            assert stream.answer.usage.completion_tokens == 150
            assert stream.longest_pause(since=killed_at) < (GOES_ON_WITHIN_S if stream in killed else STALLS_S)
            assert stream.answer.token_ids == undisturbed[seed].token_ids, f"request {seed}"

        fleet.until_said(f"{victim} is back")
        assert any(f"{victim} (pid {pids[victim]}) was ended by SIGKILL" in line for line in fleet.said)

        async def both_are_there() -> bool:
            return {worker.id for worker in await client.workers()} == {"w0", "w1"}

        await eventually(both_are_there, 10)
        after = {worker.id: worker.incarnation for worker in await client.workers()}
        assert after[other] == before[other]
        assert after[victim] != before[victim]
        assert [(queue.undelivered, queue.pending) for queue in await client.queues()] == [(0, 0), (0, 0)]
        assert (await client.generate(request_of(20, 0, salt="after"))).finish == "LENGTH"


async def test_a_cancelled_call_stops_the_work(fleet: Up) -> None:
    async with Client(fleet.target) as client:
        request = request_of(20, 0, salt="cancel", max_tokens=2000)
        async for _ in client.responses(request):
            break
        workers = await idle_workers(client)
        assert [worker.running for worker in workers] == [0, 0]
        assert [(queue.undelivered, queue.pending) for queue in await client.queues()] == [(0, 0), (0, 0)]
