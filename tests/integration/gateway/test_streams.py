"""Output that takes detours: lost messages, lost connections, slow readers, a second reader of the same job."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.errors import RequestIdTaken
from octavo.v1 import inference_pb2
from tests.integration.gateway.harness import (
    Client,
    collect,
    failure,
    fleet,
    request,
    ring_elsewhere,
    running_gateway,
    tokens,
)
from tests.integration.gateway.scripted import ScriptedWorker, chunk

if TYPE_CHECKING:
    from gateway.server import Gateway
    from kvstore.client import Broker

Code = grpc.StatusCode


async def test_a_gap_is_filled_from_the_log_at_once(worker: ScriptedWorker, gateway: Gateway, client: Client) -> None:
    call = client.generate(request())
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    assert (await call.read()).chunks[0].start == 0
    await ring_elsewhere(worker, claim, "nobody")
    await worker.commit(chunk(claim, 1, [11]))
    await worker.commit(chunk(claim, 2, [12, 13]))
    await ring_elsewhere(worker, claim, gateway.incarnation)
    began = time.monotonic()
    await worker.commit(chunk(claim, 4, [14]))
    response = await call.read()
    assert [list(each.token_ids) for each in response.chunks] == [[11], [12, 13], [14]]
    assert time.monotonic() - began < 0.8  # before the look that follows a second of silence
    await worker.commit(chunk(claim, 5, [15], finish=inference_pb2.STOP))
    assert list((await call.read()).chunks[0].token_ids) == [15]
    assert await call.code() is Code.OK


async def test_a_lost_last_message_is_found_after_a_second_of_silence(worker: ScriptedWorker, client: Client) -> None:
    call = client.generate(request())
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    await ring_elsewhere(worker, claim, "nobody")
    await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
    responses = await asyncio.wait_for(collect(call), 3)
    assert tokens(responses) == [10, 11]
    assert responses[-1].usage.completion_tokens == 2


async def test_streams_survive_a_cut_subscription(worker: ScriptedWorker, client: Client) -> None:
    calls = [client.generate(request(f"r{index}")) for index in range(4)]
    claims = await worker.claim(4)
    await worker.commit(*(chunk(claim, 0, [10]) for claim in claims))
    for call in calls:
        await call.read()
    await worker.broker.call("CLIENT", "KILL", "TYPE", "pubsub")
    await worker.commit(*(chunk(claim, 1, [11]) for claim in claims))
    await worker.commit(*(chunk(claim, 2, [12], finish=inference_pb2.LENGTH) for claim in claims))
    for responses in await asyncio.wait_for(asyncio.gather(*map(collect, calls)), 5):
        assert [list(each.token_ids) for response in responses for each in response.chunks] == [[11], [12]]


async def test_a_slow_reader_gets_everything_and_holds_up_nobody(worker: ScriptedWorker, client: Client) -> None:
    """The slow one reads nothing while 1500 chunks of 2 KB, far above its buffers, are committed for it."""
    slow = client.generate(request("slow", max_tokens=2000))
    (slow_claim,) = await worker.claim()
    fast = client.generate(request("fast", max_tokens=2000))
    (fast_claim,) = await worker.claim()
    reading = asyncio.create_task(collect(fast))
    for start in range(0, 1500, 10):
        steps = [chunk(slow_claim, index, [index % 300], text="x" * 2000) for index in range(start, start + 10)]
        await worker.commit(*steps, chunk(fast_claim, start // 10, [start % 300]))
    await worker.commit(
        chunk(slow_claim, 1500, [0], finish=inference_pb2.LENGTH),
        chunk(fast_claim, 150, [0], finish=inference_pb2.STOP),
    )
    assert len(tokens(await asyncio.wait_for(reading, 5))) == 151
    responses = await asyncio.wait_for(collect(slow), 20)
    assert tokens(responses) == [index % 300 for index in range(1500)] + [0]
    assert "".join(each.text for response in responses for each in response.chunks).startswith("x" * 3_000_000)
    assert max(response.ByteSize() for response in responses) < 1024 * 1024


@pytest.mark.parametrize("phase", ["queued", "running", "ended"])
async def test_the_same_id_and_payload_attaches_and_replays(worker: ScriptedWorker, client: Client, phase: str) -> None:
    first = client.generate(request("r1"))
    await first.initial_metadata()
    claim = None
    if phase != "queued":
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [10]))
    if phase == "ended":
        assert claim is not None
        await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
        assert tokens(await collect(first)) == [10, 11]
    second = client.generate(request("r1"))
    await second.initial_metadata()
    if claim is None:
        (claim,) = await worker.claim()
        await worker.commit(chunk(claim, 0, [10]))
    if phase != "ended":
        await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
        assert tokens(await collect(first)) == [10, 11]
    responses = await collect(second)
    assert tokens(responses) == [10, 11]
    assert responses[0].route.worker == "w0"
    assert responses[-1].usage.completion_tokens == 2
    assert [queue.undelivered + queue.pending for queue in await worker.jobs.queues()] == [0]


@pytest.mark.parametrize("entries", [511, 512, 513, 1024])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_long_outputs_are_replayed_page_by_page(
    worker: ScriptedWorker, client: Client, entries: int, cancelled: bool
) -> None:
    """A log is read in pages of 512 entries. Its last entry ends the job."""
    first = client.generate(request("r1", max_tokens=2000))
    (claim,) = await worker.claim()
    await worker.commit(*(chunk(claim, index, [index % 300]) for index in range(entries - 1)))
    if cancelled:
        await worker.jobs.cancel("r1")
    else:
        await worker.commit(chunk(claim, entries - 1, [], finish=inference_pb2.STOP))
    expected = [index % 300 for index in range(entries - 1)]
    assert tokens(await asyncio.wait_for(collect(first), 5)) == expected
    assert tokens(await asyncio.wait_for(collect(client.generate(request("r1", max_tokens=2000))), 5)) == expected


async def test_an_id_that_another_payload_has_is_refused_and_its_job_goes_on(
    worker: ScriptedWorker, client: Client
) -> None:
    first = client.generate(request("r1"))
    (claim,) = await worker.claim()
    taken = (Code.ALREADY_EXISTS, str(RequestIdTaken("r1")))
    assert await failure(client.generate(request("r1", max_tokens=17))) == taken
    assert await failure(client.generate(request("r1", prompt=[9]))) == taken
    await worker.answer(claim)
    assert tokens(await collect(first)) == [2, 3, 4]


async def test_another_gateway_takes_a_job_over(worker: ScriptedWorker, client: Client, broker: Broker) -> None:
    """Both readers get all of it: the first one from the log, as the doorbell rings for the second."""
    first = client.generate(request("r1"))
    (claim,) = await worker.claim()
    await worker.commit(chunk(claim, 0, [10]))
    await first.read()
    async with running_gateway(broker) as (_, _, other):
        second = other.generate(request("r1"))
        await second.initial_metadata()
        await worker.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
        assert tokens(await asyncio.wait_for(collect(second), 5)) == [10, 11]
        assert list((await asyncio.wait_for(first.read(), 5)).chunks[0].token_ids) == [11]
        # Leaving does not end a job that is now another gateway's.
        third = client.generate(request("r2"))
        (claim,) = await worker.claim()
        await other.generate(request("r2")).initial_metadata()
        third.cancel()
        await asyncio.sleep(0.3)  # what does not happen announces itself nowhere
        await worker.answer(claim)
        assert tokens(await collect(other.generate(request("r2")))) == [2, 3, 4]


async def test_hostile_payloads_are_counted_and_dropped(
    worker: ScriptedWorker, gateway: Gateway, client: Client, broker: Broker
) -> None:
    call = client.generate(request("r1"))
    (claim,) = await worker.claim()
    channel = broker.keys.channel(gateway.incarnation)
    endless = chunk(claim, 0, [])
    other_choice = chunk(claim, 0, [1])
    other_choice.chunk.choice = 7
    for payload in (
        b"\x80\x04\x95pickle",
        b"",
        inference_pb2.GenerateRequest(text="not a delivery").SerializeToString(),
        b"\x0a" + bytes([endless.ByteSize()]) + endless.SerializeToString(),
        b"\x0a" + bytes([other_choice.ByteSize()]) + other_choice.SerializeToString(),
    ):
        await broker.call("PUBLISH", channel, payload)
    await worker.answer(claim)
    assert tokens(await collect(call)) == [2, 3, 4]
    # Nothing, and fields that nobody knows, are no deliveries and no offence; the other three are counted.
    assert gateway.metrics.registry.get_sample_value("octavo_malformed_values_total") == 3


async def test_a_burst_is_spread_over_the_workers(broker: Broker) -> None:
    """40 equal requests at once: whatever Redis shows at the time, no worker gets them all."""
    workers = ScriptedWorker(broker, "w0"), ScriptedWorker(broker, "w1")
    async with fleet(broker, *workers) as client:
        calls = [client.generate(request(f"r{index}")) for index in range(40)]
        for call in calls:
            await call.initial_metadata()
        queues = {queue.worker: queue.undelivered for queue in await workers[0].jobs.queues()}
        assert sum(queues.values()) == 40
        assert min(queues.values()) >= 15
        for worker in workers:
            worker.serve()
        for responses in await asyncio.gather(*map(collect, calls)):
            assert tokens(responses) == [2, 3, 4]
