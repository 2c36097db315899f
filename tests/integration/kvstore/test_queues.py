"""How long queues are, by the server's own count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.jobs import QueueInfo

if TYPE_CHECKING:
    from kvstore.client import Broker

    from .conftest import Stage


async def test_counts_survive_deletions_from_the_middle(stage: Stage, broker: Broker) -> None:
    """A cancelled job leaves a hole in the stream, after which the server's own ``lag`` is unknown."""
    assert await stage.jobs.queues() == []
    worker = await stage.worker()
    stream = broker.keys.jobs("w0")
    assert await stage.jobs.queues() == [QueueInfo("w0", stream, 0, 0, 0)]
    for number in range(6):
        await stage.submit(f"r{number}", worker)
    entries = await stage.entries(worker, count=2)
    await stage.jobs.claim(worker.id, worker.incarnation, entries)
    await stage.jobs.cancel("r1")
    await stage.jobs.cancel("r4")
    (group,) = await broker.call("XINFO GROUPS", stream)
    assert group["lag"] != 3
    (queue,) = await stage.jobs.queues()
    assert (queue.worker, queue.stream, queue.undelivered, queue.pending) == ("w0", stream, 3, 1)


async def test_the_oldest_is_aged_by_the_servers_clock(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await asyncio.sleep(0.2)
    await stage.submit("r2", worker)
    assert (await stage.jobs.queues())[0].oldest_age_ms >= 200
    await stage.jobs.cancel("r1")
    await stage.jobs.cancel("r2")
    assert (await stage.jobs.queues())[0].oldest_age_ms == 0


async def test_all_workers_in_two_round_trips(stage: Stage, broker: Broker) -> None:
    for number in range(12):
        worker = await stage.worker(f"w{number:02}")
        await stage.submit(f"r{number}", worker)
    await broker.call("DEL", broker.keys.jobs("w03"))
    await broker.call("SET", broker.keys.jobs("w03"), "no stream")
    queues = await stage.jobs.queues()
    assert [queue.worker for queue in queues] == [f"w{number:02}" for number in range(12)]
    assert [queue.undelivered for queue in queues] == [1, 1, 1, 0, *[1] * 8]
    await broker.call("DEL", broker.keys.jobs("w03"))
