"""What a batch in the background costs those who wait for answers, first tokens with and without it; and that a kill
of its worker loses none of its lines, and does none twice."""

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
    from collections.abc import Callable, Iterator, Sequence

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
                "OCTAVO_TIDY_EVERY": "0",
            }
            workers = [
                Child(name, ("ops.cli", "batch", "worker"), environment, sink) for name in ("batch", "batch again")
            ]
            try:
                await _begun(workers[0])
                return await _measured(config, client, Place(store, Path(folder)), workers, note)
            finally:
                for worker in workers:
                    if worker.running:
                        await worker.kill()
                store.close()


async def _begun(worker: Child) -> None:
    await worker.start()
    await worker.wait_ready(START_S)


async def _measured(
    config: BatchBench, client: Client, place: Place, workers: Sequence[Child], note: Callable[[str], None]
) -> dict[str, Any]:
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
    await workers[0].kill()
    killed = await asyncio.to_thread(batches.status, place.store, batch.id)
    note(f"killed its worker after {killed.progress.done} lines; another one goes on")
    await _begun(workers[1])
    ended = await _until(place.store, batch.id, lambda found: found.state.ended)
    if ended.state is not BatchState.COMPLETED or ended.progress.failed:
        raise ChildFailed(f"the batch is {ended.state}, {ended.progress.failed} lines failed: {ended.error}")
    results = [json.loads(each)["id"] for each in batches.results(place, batch.id)]
    return told(config, alone, beside, Outcome(killed, ended, results))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the batch. `killed`: as it was when its worker was killed; `results`: ids of lines with a result,
    in their order."""

    killed: Batch
    ended: Batch
    results: list[str]


def told(config: BatchBench, alone: Level, beside: Level, outcome: Outcome) -> dict[str, Any]:
    """The figures."""
    ended, found = outcome.ended, set(outcome.results)
    seconds = (ended.ended_ms - ended.started_ms) / 1000
    first = [level.first_token_s for level in (alone, beside)]
    ratio = first[1].p90 / first[0].p90 if first[0] is not None and first[1] is not None else None
    return {
        "lines": config.lines,
        "in_flight": config.in_flight,
        "priority": config.priority,
        "users": config.users,
        "alone": alone.as_dict(),
        "beside": beside.as_dict(),
        "ttft_p90_ratio": ratio,
        "ended_before_users": outcome.killed.state.ended,
        "done_when_killed": outcome.killed.progress.done,
        "lost": len({str(number) for number in range(config.lines)} - found),
        "doubled": len(outcome.results) - len(found),
        "batch_s": seconds,
        "lines_per_s": config.lines / seconds,
        "batch": asdict(ended.progress),
        "cells": [cells(config, alone, None), cells(config, beside, config.lines / seconds)],
    }


def verdict(results: dict[str, Any]) -> str:
    """In words."""
    ratio = results["ttft_p90_ratio"]
    first = (
        "no first tokens to compare" if ratio is None else f"TTFT p90 beside the batch is {ratio:.2f} times that alone"
    )
    when = "had ended before its users" if results["ended_before_users"] else "killed"
    kill = f"its worker {when}, after {results['done_when_killed']} of {results['lines']} lines"
    return f"{first}; {kill}: {results['lost']} lines lost, {results['doubled']} doubled"


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
