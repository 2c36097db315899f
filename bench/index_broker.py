"""What `octavo bench index` asks of a broker, and says to it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from bench.index_figures import Reading
from kvstore.doorbell import Doorbell
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.client import Broker


async def read(broker: Broker) -> Reading:
    """What the server has spent so far."""
    info = await broker.call("INFO", "commandstats", "cpu")
    scripts = info.get("cmdstat_evalsha", {"usec": 0})
    cpu = info["used_cpu_user"] + info["used_cpu_sys"]
    return Reading(scripts["usec"] / 1e6, float(cpu))


def delivery(request_id: str, start: int) -> job_pb2.Delivery:
    """One token, from a place on."""
    body = inference_pb2.Chunk(start=start, token_ids=[start % 50_000], text=" word")
    return job_pb2.Delivery(request_id=request_id, attempt=1, chunk=body)


@asynccontextmanager
async def listening(broker: Broker, channel: str) -> AsyncIterator[None]:
    """Somebody takes what is published there."""
    bell = Doorbell(broker)
    await bell.open(channel)

    async def listen() -> None:
        async for _ in bell:
            pass

    task = asyncio.create_task(listen())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bell.close()
