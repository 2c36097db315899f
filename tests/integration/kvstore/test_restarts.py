"""Servers that are restarted, with and without their data, and flushed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.doorbell import RECONNECTED, Doorbell
from kvstore.embedded import EmbeddedBroker
from kvstore.entries import PENDING_AT_ONCE
from kvstore.jobs import Commit, Submitted
from kvstore.registry import Registry
from octavo.v1 import inference_pb2

from .conftest import LONG_TTL_MS, SHORT_TTL_MS, Stage, chunk, on_both_servers, set_stage, until
from .proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = on_both_servers


class Restartable:
    """A server behind an address that stays, with an append-only file."""

    def __init__(self, binary: Path, folder: Path, proxy: Proxy) -> None:
        self.binary, self.folder, self.proxy = binary, folder, proxy
        self.server: EmbeddedBroker | None = None

    async def start(self) -> None:
        options = {"dir": str(self.folder), "appendonly": "yes", "appendfsync": "always"}
        self.server = EmbeddedBroker(binary=self.binary, options=options)
        self.proxy.upstream = await self.server.start()

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop()


@pytest.fixture
async def server(broker_binary: Path, tmp_path: Path) -> AsyncIterator[Restartable]:
    async with Proxy("redis://127.0.0.1:1") as proxy:
        server = Restartable(broker_binary, tmp_path, proxy)
        await server.start()
        yield server
        await server.stop()


@pytest.fixture
async def stage(server: Restartable, namespace: str) -> AsyncIterator[Stage]:
    broker = await connect(BrokerConfig(server.proxy.url, namespace, retries=8))
    async with set_stage(broker, SHORT_TTL_MS) as stage:
        yield stage
    await broker.close()


async def test_a_restart_with_its_data_kills_nobody(stage: Stage, server: Restartable) -> None:
    worker = await stage.worker()
    await stage.running("running", worker)
    await stage.submit("queued", worker)
    await server.stop()
    await asyncio.sleep(SHORT_TTL_MS / 1000)
    await server.start()
    # All leases have lapsed, but only because nobody could renew them.
    assert await stage.registry.workers() == []
    assert await stage.jobs.orphans() == []
    assert (await stage.registry.renew(worker)).held_lease
    beating = asyncio.create_task(stage.beat(worker))

    last = chunk("running", 0, [1], finish=inference_pb2.STOP)
    assert await stage.commit(worker, last) == [Commit.WRITTEN]
    (claim,) = await stage.claim(worker)
    assert claim.job.request_id == "queued"
    beating.cancel()
    # One that does not come back is found to be dead a little later.
    assert [orphan.request_id for orphan in await until(stage.jobs.orphans)] == ["queued"]


async def test_a_flush_loses_the_work_and_nothing_else(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("lost", worker)
    await stage.broker.call("FLUSHALL")
    await stage.broker.call("SCRIPT", "FLUSH")

    assert await stage.commit(worker, chunk("lost", 0, [1])) == [Commit.FENCED]
    assert await stage.jobs.get("lost") is None
    assert (await stage.registry.renew(worker)).held_lease
    started = time.monotonic()
    # Submitted anew under its old id, it is another job: its entry says so.
    assert await stage.submit("lost", worker) is Submitted.ACCEPTED
    (claim,) = await stage.claim(worker)
    assert (claim.job.request_id, claim.attempt) == ("lost", 1)
    assert time.monotonic() - started < 2


async def test_a_stream_that_keeps_vanishing_is_not_a_hot_loop(stage: Stage) -> None:
    worker = await stage.worker()
    stream = stage.broker.keys.jobs("w0")
    await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 1)
    started = time.monotonic()
    for _ in range(4):
        await stage.broker.call("DEL", stream)
        assert await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 1) == []
    assert time.monotonic() - started > 4 * 0.05


async def test_a_blocked_read_survives_its_streams_deletion(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 1)
    read = asyncio.create_task(stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 10_000))

    async def blocked() -> bool:
        return bool((await stage.broker.call("INFO", "clients"))["blocked_clients"])

    await until(blocked)
    await stage.broker.call("DEL", stage.broker.keys.jobs("w0"))
    async with asyncio.timeout(5):
        assert await read == []
    assert (await stage.registry.renew(worker)).held_lease
    await stage.running("r1", worker)


async def test_a_doorbell_rings_again_and_says_that_it_was_broken(stage: Stage, server: Restartable) -> None:
    bell = Doorbell(stage.broker)
    channel = stage.broker.keys.channel("g")
    await bell.open(channel)
    heard = aiter(bell)
    await stage.broker.call("PUBLISH", channel, "one")
    assert await anext(heard) == b"one"
    await server.stop()
    missed = asyncio.ensure_future(anext(heard))
    await asyncio.sleep(0.3)
    await server.start()
    async with asyncio.timeout(10):
        assert await missed is RECONNECTED
    await stage.broker.call("PUBLISH", channel, "two")
    assert await anext(heard) == b"two"
    server.proxy.cut()
    assert await anext(heard) is RECONNECTED
    await bell.close()
    await bell.close()


async def test_a_doorbell_notices_a_server_that_fell_silent(stage: Stage, server: Restartable) -> None:
    bell = Doorbell(stage.broker, probe_s=0.15)
    channel = stage.broker.keys.channel("g")
    await bell.open(channel)
    heard = aiter(bell)
    # A server that only has nothing to say is asked, and answers.
    waiting = asyncio.ensure_future(anext(heard))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    before = server.proxy.accepted
    server.proxy.hold()

    async def gave_up() -> bool:
        return server.proxy.accepted > before

    await until(gave_up)
    server.proxy.release()
    assert await waiting is RECONNECTED
    await bell.close()


async def test_a_claim_that_is_lost_while_nobody_reads_is_made_again(stage: Stage, server: Restartable) -> None:
    """The server comes back with the entry read, and its claim lost: as after a last second that was not written."""
    worker = await stage.worker()
    claim = await stage.running("r1", worker)
    await stage.running("r2", worker)

    async def next_claims() -> list[tuple[str, str, int]]:
        entries = await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 1)
        claims = await stage.jobs.claim(worker.id, worker.incarnation, entries)
        return [(each.job.request_id, each.entry_id, each.attempt) for each in claims]

    assert await next_claims() == []  # all that is pending has been looked through
    lost = ("state", "queued", "owner", "", "attempt", "0")
    await stage.broker.call("HSET", stage.broker.keys.job("r1"), *lost)
    await server.stop()
    await server.start()
    # The client is connected again by itself, and no read has failed.
    await stage.broker.call("PING")
    await stage.reader.connection_pool.disconnect()
    assert await next_claims() == []
    stage.jobs.read_again(worker.id, worker.incarnation)
    first, (name, _, attempt) = await next_claims()
    assert first == ("r1", claim.entry_id, 1)
    assert (name, attempt) == ("r2", 1)  # claimed before: the same claim again
    assert await next_claims() == []
    for name in ("r1", "r2"):
        assert await stage.commit(worker, chunk(name, 0, [1], finish=inference_pb2.STOP)) == [Commit.WRITTEN]


async def test_what_is_pending_is_looked_through_in_few_reads(stage: Stage) -> None:
    """However few new jobs there is room for: they wait behind it."""
    worker = await stage.worker()
    await Registry(stage.broker, lease_ttl_ms=LONG_TTL_MS).renew(worker)
    for index in range(PENDING_AT_ONCE + 2):
        await stage.running(f"r{index}", worker)
    stage.jobs.read_again(worker.id, worker.incarnation)
    read = [await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 1) for _ in range(3)]
    assert [len(entries) for entries in read] == [PENDING_AT_ONCE, 2, 0]


async def test_to_read_again_does_not_get_lost_in_a_read_that_is_under_way(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    reading = asyncio.create_task(stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 300))

    async def blocked() -> bool:
        return bool((await stage.broker.call("INFO", "clients"))["blocked_clients"])

    await until(blocked)
    stage.jobs.read_again(worker.id, worker.incarnation)
    assert await reading == []
    (entry,) = await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 1)
    assert entry.request_id == "r1"


async def test_what_was_said_before_a_flush_is_refused_by_the_job_that_has_the_id_now(stage: Stage) -> None:
    """The new job has the same attempt and begins at the same token, at the same worker."""
    worker = await stage.worker()
    old = await stage.running("r1", worker)
    await stage.broker.call("FLUSHALL")
    await stage.registry.renew(worker)
    new = await stage.running("r1", worker)
    assert (old.attempt, new.attempt) == (1, 1)

    async def commit(entry: str, *tokens: int) -> list[Commit]:
        step = [chunk("r1", 0, tokens)]
        return (await stage.jobs.commit(worker.id, worker.incarnation, step, None, [entry])).outcomes

    assert await commit(old.entry_id, 8, 9) == [Commit.FENCED]
    assert await stage.log("r1") == []
    assert await commit(new.entry_id, 1, 2) == [Commit.WRITTEN]
    assert await commit(old.entry_id, 1, 2) == [Commit.FENCED]
    assert await commit(new.entry_id, 1, 2) == [Commit.DUPLICATE]
    end = chunk("r1", 2, [], finish=inference_pb2.STOP)
    committed = await stage.jobs.commit(worker.id, worker.incarnation, [end, end], None, [old.entry_id, new.entry_id])
    assert committed.outcomes == [Commit.FENCED, Commit.WRITTEN]
    assert await stage.load(worker) == (0, 0)
