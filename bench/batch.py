"""What a batch in the background costs those who wait for answers: first tokens with and without it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.runner import measure, warm_up
from gateway.batch import batches
from gateway.batch.batches import Place
from kvstore.batches import BatchState, BatchStore, Settings
from ops.child import Child, ChildFailed
from ops.client import Client
from ops.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.stats import Level
    from bench.workload import Workload
    from kvstore.batches import Batch
    from octavo.v1 import inference_pb2
    from ops.child import LineSink
    from ops.config import FleetConfig

COLUMNS: Final = ("users", "batch", "requests", "errors", "TTFT p50", "p90", "per token p50", "p90", "batch lines/s")
START_S: Final = 60.0
LOOK_S: Final = 0.1
WARM_UP: Final = 8
END_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class BatchBench:
    """One run."""

    workload: Workload
    """Of those who wait, and of the batch: its lines are as long, and others."""
    lines: int
    users: int
    """Requests of those who wait, at once; each asks again when it has its answer."""
    requests: int
    """Of theirs, with and without a batch."""
    in_flight: int
    priority: int


async def run_batch(
    config: BatchBench, settings: FleetConfig, sink: LineSink, note: Callable[[str], None]
) -> dict[str, Any]:
    """The figures, as JSON shows them. Raises ChildFailed, KvError, AioRpcError, TimeoutError."""
    with tempfile.TemporaryDirectory(prefix="octavo-batches-") as folder:
        async with Fleet(settings, sink, note) as fleet, Client(fleet.targets[0]) as client:
            store = BatchStore(fleet.redis, settings.namespace)
            environment = {
                **os.environ,
                "OCTAVO_REDIS": fleet.redis,
                "OCTAVO_NAMESPACE": settings.namespace,
                "OCTAVO_TARGET": ",".join(fleet.targets),
                "OCTAVO_BATCHES": folder,
            }
            worker = Child("batch", ("ops.cli", "batch", "worker"), environment, sink)
            await worker.start()
            try:
                await worker.wait_ready(START_S)
                return await _measured(config, client, Place(store, Path(folder)), note)
            finally:
                await worker.kill()
                store.close()


async def _measured(config: BatchBench, client: Client, place: Place, note: Callable[[str], None]) -> dict[str, Any]:
    size = (await client.model()).vocab_size
    await warm_up(client, config.workload.requests(WARM_UP, size, 0))
    note(f"{config.requests} requests of {config.users} users, without a batch")
    alone, _ = await measure(client, config.workload.requests(config.requests, size, 1), config.users)
    lines = config.workload.requests(config.lines, size, 2)
    wanted = Settings(name="bench", in_flight=config.in_flight, priority=config.priority)
    batch = await asyncio.to_thread(batches.submit, place, raw(lines), wanted)
    await _until(place.store, batch.id, lambda found: found.progress.done > 0)
    note(f"the same beside a batch of {config.lines} lines")
    beside, _ = await measure(client, config.workload.requests(config.requests, size, 3), config.users)
    during = await asyncio.to_thread(batches.status, place.store, batch.id)
    note("the rest of the batch")
    ended = await _until(place.store, batch.id, lambda found: found.state.ended)
    if ended.state is not BatchState.COMPLETED or ended.progress.failed:
        raise ChildFailed(f"the batch is {ended.state}, {ended.progress.failed} lines failed: {ended.error}")
    seconds = (ended.ended_ms - ended.started_ms) / 1000
    return {
        "lines": config.lines,
        "in_flight": config.in_flight,
        "priority": config.priority,
        "users": config.users,
        "alone": alone.as_dict(),
        "beside": beside.as_dict(),
        "ended_before_users": during.state.ended,
        "batch_s": seconds,
        "lines_per_s": config.lines / seconds,
        "batch": asdict(ended.progress),
        "cells": [cells(config, alone, None), cells(config, beside, config.lines / seconds)],
    }


def raw(requests: list[inference_pb2.GenerateRequest]) -> Iterator[bytes]:
    """The lines of a batch that asks for these greedy requests."""
    for number, request in enumerate(requests):
        line = {
            "id": str(number),
            "token_ids": list(request.token_ids.ids),
            "max_tokens": request.stopping.max_tokens,
            "ignore_eos": request.stopping.ignore_eos,
            "temperature": 0,
            "cache_salt": request.cache_salt,
        }
        yield json.dumps(line).encode() + b"\n"


def cells(config: BatchBench, level: Level, rate: float | None) -> tuple[Any, ...]:
    """A line of the table, in milliseconds."""
    first, each = level.first_token_s, level.seconds_per_token
    times = [
        "-" if spread is None else f"{value * 1000:.0f} ms"
        for spread in (first, each)
        for value in ((0.0, 0.0) if spread is None else (spread.p50, spread.p90))
    ]
    batch = "no" if rate is None else "yes"
    told = "-" if rate is None else f"{rate:.1f}"
    return (config.users, batch, level.requests, sum(level.errors.values()), *times, told)


async def _until(store: BatchStore, batch_id: str, condition: Callable[[Batch], bool]) -> Batch:
    async with asyncio.timeout(END_S):
        while not condition(batch := await asyncio.to_thread(batches.status, store, batch_id)):  # noqa: ASYNC110 (nothing to await)
            await asyncio.sleep(LOOK_S)
    return batch
