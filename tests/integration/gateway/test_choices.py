"""Requests with several choices: each is whole and has one end, however the job goes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from octavo.v1 import job_pb2
from octavo.v1.inference_pb2 import CANCELLED, ERROR, LENGTH, STOP, CancelRequest, TokenLogprob, TokenLogprobs, Usage
from tests.integration.gateway.harness import (
    Client,
    answers,
    chunks,
    collect,
    failed_stream,
    request,
    ring_elsewhere,
    running_gateway,
)
from tests.integration.gateway.scripted import ScriptedWorker, chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.server import Gateway
    from kvstore.client import Broker
    from octavo.v1.inference_pb2 import GenerateResponse

Code = grpc.StatusCode


def ends(responses: Sequence[GenerateResponse]) -> list[tuple[int, int, int]]:
    """Choice, start and finish of the terminal chunks, as they came."""
    return [(each.choice, each.start, each.finish) for each in chunks(responses) if each.finish]


async def test_choices_of_different_lengths_each_end_by_themselves(worker: ScriptedWorker, client: Client) -> None:
    """C11"""
    call = client.generate(request("r1", n=3, max_tokens=7))
    (claim,) = await worker.claim()
    assert claim.job.n == 3
    loads = await worker.registry.loads([worker.info])
    assert loads["w0"].tokens == 3 + 3 * 7
    await worker.commit(*(chunk(claim, 0, [10 + choice], choice=choice) for choice in range(3)))
    await worker.commit(chunk(claim, 1, [20], finish=STOP, used=4), chunk(claim, 1, [21], choice=1))
    await worker.commit(chunk(claim, 1, [], choice=2, finish=LENGTH, used=5))
    early = [await call.read()]
    while len(chunks(early)) < 6:
        early.append(await call.read())
    await worker.commit(chunk(claim, 2, [31, 32, 33], choice=1, finish=STOP, used=8))
    responses = [*early, *await collect(call)]
    assert answers(responses, 3) == [[10, 20], [11, 21, 31, 32, 33], [12]]
    assert ends(responses) == [(0, 1, STOP), (2, 1, LENGTH), (1, 2, STOP)]
    assert responses[-1].usage == Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=8, attempts=1)
    assert await call.code() is Code.OK


async def test_all_a_worker_says_reaches_the_caller(worker: ScriptedWorker, client: Client) -> None:
    """The first chunk, with a prompt's log-probabilities, is as large as they get. The client has gRPC's own limits."""
    call = client.generate(request("r1", n=2, logprobs=20, prompt_logprobs=20))
    (claim,) = await worker.claim()
    assert (claim.job.logprobs, claim.job.prompt_logprobs) == (20, 20)
    top = [TokenLogprob(token_id=49_000 + index, logprob=-0.25 * index) for index in range(20)]
    one = TokenLogprobs(token_id=49_151, logprob=-0.5, top=top)
    step = [chunk(claim, 0, [10], choice=choice) for choice in range(2)]
    step[0].chunk.prompt_logprobs.extend([one] * 6240)
    assert step[0].ByteSize() > 1_400_000
    last = [chunk(claim, 1, [7], choice=choice, finish=STOP, used=4) for choice in range(2)]
    for delivery in (*step, *last):
        delivery.chunk.logprobs.append(one)
    for delivery in last:
        delivery.chunk.stop_token = 7
    last[1].chunk.ClearField("stop_token")
    last[1].chunk.stop_match = "<7>"
    await worker.commit(*step)
    await worker.commit(*last)
    responses = await collect(call)
    assert chunks(responses) == [delivery.chunk for delivery in (*step, *last)]
    assert answers(responses, 2) == [[10, 7], [10, 7]]


@pytest.mark.parametrize("committed", [False, True])
async def test_cancel_ends_all_that_are_open(worker: ScriptedWorker, client: Client, committed: bool) -> None:
    call = client.generate(request("r1", n=4))
    (claim,) = await worker.claim()
    early: list[GenerateResponse] = []
    if committed:
        await worker.commit(chunk(claim, 0, [10, 11]), chunk(claim, 0, [12], choice=2, finish=STOP, used=3))
        while len(chunks(early)) < 2:
            early.append(await call.read())
    assert (await client.cancel(CancelRequest(request_id="r1"))).cancelled
    responses = [*early, *await collect(call)]
    assert answers(responses, 4) == ([[10, 11], [], [12], []] if committed else [[], [], [], []])
    assert ends(responses) == (
        [(2, 0, STOP), (0, 2, CANCELLED), (1, 0, CANCELLED), (3, 0, CANCELLED)]
        if committed
        else [(choice, 0, CANCELLED) for choice in range(4)]
    )
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.attempts) == (3, 3 if committed else 0, 1)
    assert await call.code() is Code.OK
    assert await worker.told_to_drop() == "r1"


async def test_the_status_of_a_failure_follows_after_all_terminal_chunks(
    worker: ScriptedWorker, client: Client
) -> None:
    """A worker ends every choice with one delivery each, here in two commits."""
    call = client.generate(request("r1", n=3))
    (claim,) = await worker.claim()
    failed = {"finish": ERROR, "failure": job_pb2.FAILURE_INTERNAL, "error": "non-finite logits"}
    await worker.commit(chunk(claim, 0, [10]), chunk(claim, 0, [11], choice=1, finish=STOP, used=2))
    await worker.commit(chunk(claim, 1, [], used=2, **failed))
    early = [await call.read()]
    while len(ends(early)) < 2:
        early.append(await call.read())
    assert ends(early) == [(1, 0, STOP), (0, 1, ERROR)]
    await worker.commit(chunk(claim, 0, [], choice=2, used=2, **failed))
    responses, code, message = await failed_stream(call)
    assert (code, message) == (Code.INTERNAL, "non-finite logits")
    assert answers([*early, *responses], 3) == [[10], [11], []]


async def test_a_deadline_ends_all(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request("r1", n=3), timeout=0.5)
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    _, code, _ = await failed_stream(call)
    assert code is Code.DEADLINE_EXCEEDED
    assert await worker.told_to_drop() == "r1"
    replayed, _, message = await failed_stream(client.generate(request("r1", n=3)))
    assert message == "the client's deadline passed"
    assert ends(replayed) == [(0, 1, ERROR), (1, 0, ERROR), (2, 0, ERROR)]


async def test_a_gap_in_one_choice_while_another_goes_on(
    worker: ScriptedWorker, gateway: Gateway, client: Client
) -> None:
    call = client.generate(request("r1", n=2))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]), chunk(claim, 0, [20], choice=1))
    early = [await call.read()]
    await ring_elsewhere(worker, claim, "nobody")
    await worker.commit(chunk(claim, 1, [21], choice=1))
    await ring_elsewhere(worker, claim, gateway.incarnation)
    began = time.monotonic()
    await worker.commit(chunk(claim, 1, [11]), chunk(claim, 2, [22], choice=1))
    while len(chunks(early)) < 5:
        early.append(await call.read())
    assert time.monotonic() - began < 0.8  # before the look that follows a second of silence
    await worker.commit(*(chunk(claim, 2 + choice, [], choice=choice, finish=STOP, used=5) for choice in range(2)))
    assert answers([*early, *await collect(call)], 2) == [[10, 11], [20, 21, 22]]


async def test_the_lost_end_of_one_choice_is_found_while_another_goes_on(
    worker: ScriptedWorker, gateway: Gateway, client: Client
) -> None:
    """The call is never silent; that choice is."""
    call = client.generate(request("r1", n=2, max_tokens=1000))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]), chunk(claim, 0, [20], choice=1))
    responses = [await call.read()]
    await ring_elsewhere(worker, claim, "nobody")
    await worker.commit(chunk(claim, 1, [], finish=STOP, used=2))
    await ring_elsewhere(worker, claim, gateway.incarnation)
    lost, length = time.monotonic(), 1
    while not ends(responses):
        assert time.monotonic() - lost < 3
        await worker.commit(chunk(claim, length, [20], choice=1))
        length += 1
        while len([each for each in chunks(responses) if each.choice == 1]) < length:
            responses.append(await call.read())
        await asyncio.sleep(0.02)  # the pace of the other choice
    assert ends(responses) == [(0, 1, STOP)]
    await worker.commit(chunk(claim, length, [], choice=1, finish=LENGTH, used=1 + length))
    assert answers([*responses, *await collect(call)], 2) == [[10], [20] * length]


async def test_usage_is_of_all_choices_when_the_last_end_is_an_old_one(
    worker: ScriptedWorker, gateway: Gateway, client: Client
) -> None:
    """A lost delivery comes from the log when all others have ended."""
    call = client.generate(request("r1", n=2))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]), chunk(claim, 0, [20], choice=1))
    early = [await call.read()]
    await ring_elsewhere(worker, claim, "nobody")
    await worker.commit(chunk(claim, 1, [], finish=STOP, used=2))
    await ring_elsewhere(worker, claim, gateway.incarnation)
    await worker.commit(chunk(claim, 1, [21, 22, 23], choice=1, finish=STOP, used=5))
    responses = [*early, *await asyncio.wait_for(collect(call), 3)]
    assert answers(responses, 2) == [[10], [20, 21, 22, 23]]
    assert ends(responses) == [(1, 1, STOP), (0, 1, STOP)]
    assert responses[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("phase", ["queued", "running", "ended", "cancelled"])
async def test_a_second_reader_gets_every_choice_from_the_start(
    worker: ScriptedWorker, client: Client, broker: Broker, phase: str
) -> None:
    first = client.generate(request("r1", n=2))
    await first.initial_metadata()

    async def begin() -> None:
        await worker.commit(chunk(claim, 0, [10]), chunk(claim, 0, [20], choice=1, finish=STOP, used=2))

    async def end() -> None:
        if phase == "cancelled":
            await worker.jobs.cancel("r1")
        else:
            await worker.commit(chunk(claim, 1, [11], finish=STOP, used=3))

    (claim,) = await worker.claim()
    if phase != "queued":
        await begin()
    if phase in ("ended", "cancelled"):
        await end()
    async with running_gateway(broker) as (_, _, other):
        second = other.generate(request("r1", n=2))
        await second.initial_metadata()
        if phase == "queued":
            await begin()
        if phase in ("queued", "running"):
            await end()
        for responses in await asyncio.wait_for(asyncio.gather(collect(first), collect(second)), 5):
            assert answers(responses, 2) == ([[10], [20]] if phase == "cancelled" else [[10, 11], [20]])
            assert responses[-1].usage.completion_tokens == (2 if phase == "cancelled" else 3)


async def test_a_slow_reader_of_32_choices_gets_everything(worker: ScriptedWorker, client: Client) -> None:
    """It reads nothing while far more than its buffers hold is committed."""
    call = client.generate(request("r1", n=32, max_tokens=200))
    (claim,) = await worker.claim()
    for index in range(0, 100, 10):
        await worker.commit(
            *(
                chunk(claim, start, [start % 300], choice=choice, text="x" * 500)
                for start in range(index, index + 10)
                for choice in range(32)
            )
        )
    total = 32 * 100
    await worker.commit(*(chunk(claim, 100, [], choice=choice, finish=STOP, used=total) for choice in range(32)))
    responses = await asyncio.wait_for(collect(call), 20)
    assert answers(responses, 32) == [list(range(100))] * 32
    assert max(response.ByteSize() for response in responses) < 1024 * 1024
    assert responses[-1].usage.completion_tokens == total


async def test_what_is_said_of_a_choice_that_was_not_asked_for_is_dropped(
    worker: ScriptedWorker, gateway: Gateway, client: Client, broker: Broker
) -> None:
    call = client.generate(request("r1", n=2))
    (claim,) = await worker.claim()
    for choice in (2, 2**32 - 1):
        stray = job_pb2.Deliveries(deliveries=[chunk(claim, 0, [1], choice=choice, finish=STOP)])
        await broker.call("PUBLISH", broker.keys.channel(gateway.incarnation), stray.SerializeToString())
    await worker.commit(*(chunk(claim, 0, [10], choice=choice, finish=STOP, used=2) for choice in range(2)))
    assert answers(await collect(call), 2) == [[10], [10]]
    assert gateway.metrics.registry.get_sample_value("octavo_malformed_values_total") == 2
