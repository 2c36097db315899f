"""What a run leaves in the broker, in the workers' pools and in everybody's metrics, read for the checker."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from bench.chaos.evidence import JobFacts, Key, LogEntry, Pool, Scrape, Snapshot, Stream
from kvstore.errors import BrokerError
from kvstore.jobs import Jobs
from kvstore.keys import GROUP
from kvstore.registry import Registry
from kvstore.token_log import read
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from kvstore.client import Broker

IDLE_GAUGES: Final = ("octavo_streams", "octavo_worker_sequences", "octavo_queue_depth")
"""Families of gauges that are 0 in an idle process."""
SCRAPE_S: Final = 5.0
_PAGE: Final = 500


async def snapshot(broker: Broker) -> Snapshot:
    """All of the namespace. Jobs that expire while it is read are left out. Raises BrokerError."""
    prefix = broker.keys.prefix
    keys = await _keys(broker)
    jobs, logs, streams, loads = {}, {}, {}, {}
    for name in list(keys):
        kind, _, rest = name.partition(":")
        if kind == "job" and (job := await _job(broker, prefix + name)) is not None:
            jobs[rest] = job
        elif kind == "log":
            logs[rest] = await _log(broker, rest)
        elif kind == "jobs":
            streams[rest] = await _stream(broker, prefix + name)
        elif kind == "load":
            loads[rest] = await _counts(broker, prefix + name)
    return Snapshot(keys, streams, jobs, logs, loads, asdict(await Jobs(broker).ledger()))


async def is_quiet(broker: Broker) -> bool:
    """Whether no job is left in any stream. Raises BrokerError."""
    for name in await _names(broker, "jobs:*"):
        if await broker.call("XLEN", broker.keys.prefix + name):
            return False
    return True


async def is_idle(broker: Broker) -> bool:
    """Whether, besides, no worker had anything to do at its last heartbeat. Raises BrokerError."""
    busy = [pool for pool in await pools(broker) if pool.running or pool.waiting or pool.used]
    return not busy and await is_quiet(broker)


async def pools(broker: Broker) -> tuple[Pool, ...]:
    """Of the live workers, as their last heartbeats told. Raises BrokerError."""
    return tuple(
        Pool(
            worker.id,
            worker.kv_tokens // worker.block_size,
            *(worker.blocks_free, worker.blocks_cached, worker.blocks_used),
            *(worker.running, worker.waiting),
        )
        for worker in await Registry(broker).workers()
    )


async def scrape(address: str) -> Scrape | None:
    """The metrics of the process that shows them at HOST:PORT; None when it doesn't."""
    try:
        text = await asyncio.to_thread(_fetch, address)
    except OSError:
        return None
    return parse_scrape(text)


def parse_scrape(text: str) -> Scrape:
    """The parts of a page that the checker looks at. Sizes of times (``_sum``, ``_bucket``) are none of them."""
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            # The same string in all pages of a run, of which there may be thousands.
            name = sys.intern(f"{sample.name}{{{labels}}}" if labels else sample.name)
            if family.type == "gauge" and family.name in IDLE_GAUGES:
                gauges[name] = sample.value
            elif family.type == "counter" and sample.name.endswith("_total"):
                counters[name] = sample.value
    return Scrape(gauges, counters)


def _fetch(address: str) -> str:
    with urlopen(f"http://{address}/metrics", timeout=SCRAPE_S) as response:
        page: bytes = response.read()
    return page.decode()


async def _names(broker: Broker, pattern: str) -> list[str]:
    """Names of the namespace, without its prefix."""
    prefix = broker.keys.prefix
    cursor, found = 0, set()
    while True:
        cursor, page = await broker.call("SCAN", cursor, "MATCH", prefix + pattern, "COUNT", _PAGE)
        found |= {name.decode(errors="replace").removeprefix(prefix) for name in page}
        if not cursor:
            return sorted(found)


async def _keys(broker: Broker) -> dict[str, Key]:
    found: dict[str, Key] = {}
    names = await _names(broker, "*")
    for begin in range(0, len(names), _PAGE):
        page = names[begin : begin + _PAGE]
        commands = [(what, broker.keys.prefix + name) for name in page for what in ("TYPE", "PTTL")]
        replies = await broker.pipeline(commands)
        for name, kind, ttl in zip(page, replies[::2], replies[1::2], strict=True):
            if int(ttl) != -2:  # gone meanwhile
                found[name] = Key(_text(kind), None if int(ttl) == -1 else int(ttl))
    return found


async def _job(broker: Broker, key: str) -> JobFacts | None:
    state, attempt, choices = await broker.call("HMGET", key, "state", "attempt", "choices")
    return None if state is None else JobFacts(_text(state), int(attempt or 0), int(choices or 1))


async def _log(broker: Broker, request_id: str) -> tuple[LogEntry, ...]:
    deliveries, _ = await read(broker, request_id)
    entries = []
    for delivery in deliveries:
        chunk = delivery.chunk
        finish = inference_pb2.FinishReason.Name(chunk.finish) if chunk.finish else ""
        entries.append(LogEntry(delivery.attempt, chunk.choice, chunk.start, tuple(chunk.token_ids), finish))
    return tuple(entries)


async def _stream(broker: Broker, key: str) -> Stream:
    length, summary = await broker.pipeline([("XLEN", key), ("XPENDING", key, GROUP)])
    # An error is a stream without a group: nothing is pending.
    pending = 0 if isinstance(summary, BrokerError) else int(summary["pending"])
    return Stream(int(length), pending)


async def _counts(broker: Broker, key: str) -> dict[str, int]:
    stored: dict[bytes, bytes] = await broker.call("HGETALL", key)
    return {_text(name): int(float(value)) for name, value in stored.items()}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
