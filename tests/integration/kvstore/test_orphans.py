"""Jobs whose worker died, left or was restarted."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.jobs import Commit, Jobs
from kvstore.keys import GROUP
from octavo.v1 import inference_pb2, job_pb2

from .conftest import SHORT_TTL_MS, Ear, Stage, chunk, until

if TYPE_CHECKING:
    from kvstore.client import Broker


@pytest.fixture(autouse=True)
async def _settled(broker: Broker) -> None:
    """A server that was just started gives leases time to be renewed."""

    async def settled() -> bool:
        info = await broker.call("INFO", "server")
        return bool(info["uptime_in_seconds"] * 1000 > SHORT_TTL_MS + 1000)

    await until(settled)


async def test_a_dead_workers_jobs_end(brief: Stage, broker: Broker) -> None:
    """Found by waiting, as gateways do. Elsewhere in this file the waiting is left out: ``Stage.perish``."""
    worker = await brief.worker()
    await brief.running("running", worker)
    await brief.jobs.commit(worker.id, worker.incarnation, [chunk("running", 0, [1])])
    await brief.submit("read", worker)
    await brief.entries(worker)
    await brief.submit("queued", worker)
    assert await brief.jobs.end_orphans() == []

    async with Ear(broker, brief.gateway) as gateway, Ear(broker, worker.incarnation) as owner:
        assert await until(brief.jobs.end_orphans) == ["running", "read", "queued"]
        for request_id in ("running", "read", "queued"):
            (delivery,) = await gateway.deliveries()
            assert (delivery.request_id, delivery.failure) == (request_id, job_pb2.FAILURE_UNAVAILABLE)
            assert (delivery.chunk.finish, delivery.chunk.error) == (inference_pb2.ERROR, "worker w0 died")
            assert (await brief.log(request_id))[-1] == delivery
        assert await owner.next() == b"running"
        assert owner.silent()

    # If it was only frozen: its writes are refused.
    assert await brief.commit(worker, chunk("running", 1, [2])) == [Commit.FENCED]
    for key in (broker.keys.jobs("w0"), broker.keys.load("w0", worker.incarnation), broker.keys.workers):
        assert await broker.call("EXISTS", key) == 0
    assert await brief.jobs.end_orphans() == []
    # It comes back as if it were new.
    assert (await brief.registry.renew(worker)).held_lease
    await brief.running("again", worker)


async def test_more_jobs_than_one_batch(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    ids = [f"r{number}" for number in range(250)]
    for start in range(0, 250, 50):
        await asyncio.gather(*(stage.submit(request_id, worker) for request_id in ids[start : start + 50]))
    await stage.registry.leave(worker.id, worker.incarnation)
    assert sorted(await stage.jobs.end_orphans()) == sorted(ids)
    assert await broker.call("EXISTS", broker.keys.jobs("w0"), broker.keys.workers) == 0


async def test_the_living_are_left_alone(brief: Stage) -> None:
    dead, alive = await brief.worker("w0"), await brief.worker("w1")
    await brief.submit("dead", dead)
    await brief.running("alive", alive)
    await brief.submit("queued", alive)
    beating = asyncio.create_task(brief.beat(alive))
    await brief.perish(dead)
    assert await brief.jobs.end_orphans() == ["dead"]
    for _ in range(5):
        assert await brief.jobs.end_orphans() == []
    beating.cancel()
    assert [queue.worker for queue in await brief.jobs.queues()] == ["w1"]
    assert await brief.load(alive) == (2, 20)


async def test_a_replaced_incarnations_jobs_end_except_those_it_never_read(brief: Stage, broker: Broker) -> None:
    past = await brief.worker()
    await brief.running("running", past)
    await brief.submit("read", past)
    await brief.entries(past)
    await brief.submit("queued", past)
    await brief.perish(past)
    now = await brief.worker()
    beating = asyncio.create_task(brief.beat(now))

    async with Ear(broker, brief.gateway) as gateway:
        assert sorted(await brief.jobs.end_orphans()) == ["read", "running"]
        errors = {(await gateway.deliveries())[0].chunk.error for _ in range(2)}
        assert errors == {"worker w0 was restarted"}
    assert await brief.jobs.end_orphans() == []
    assert await brief.load(past) == (1, 10)

    (claim,) = await brief.claim(now)
    assert (claim.job.request_id, claim.attempt) == ("queued", 1)
    # The charge has moved along.
    assert (await brief.load(past), await brief.load(now)) == ((0, 0), (1, 10))
    assert await brief.jobs.end_orphans() == []
    last = chunk("queued", 0, [1], finish=inference_pb2.STOP)
    assert await brief.commit(now, last) == [Commit.WRITTEN]
    assert await brief.load(now) == (0, 0)
    consumers = await broker.call("XINFO CONSUMERS", broker.keys.jobs("w0"), GROUP)
    assert [consumer["name"] for consumer in consumers] == [now.incarnation.encode()]
    beating.cancel()


async def test_a_replaced_incarnation_cannot_claim(brief: Stage) -> None:
    past = await brief.worker()
    await brief.submit("r1", past)
    entries = await brief.entries(past)
    await brief.perish(past)
    now = await brief.worker()
    assert await brief.jobs.claim(past.id, past.incarnation, entries) == []
    record = await brief.record("r1")
    assert (record.state, record.attempt) == ("queued", 0)
    assert (await brief.registry.renew(now)).held_lease
    assert await brief.jobs.end_orphans() == ["r1"]


async def test_a_worker_that_left_with_jobs(brief: Stage, broker: Broker) -> None:
    worker = await brief.worker()
    await brief.running("r1", worker)
    await brief.registry.leave(worker.id, worker.incarnation)
    # At once: there is nothing to wait for.
    assert await brief.jobs.end_orphans() == ["r1"]
    (delivery,) = await brief.log("r1")
    assert delivery.chunk.error == "worker w0 left"
    assert await broker.call("EXISTS", broker.keys.jobs("w0"), broker.keys.workers) == 0


async def test_many_gateways_end_each_job_once(brief: Stage, broker: Broker) -> None:
    dead, restarted = await brief.worker("w0"), await brief.worker("w1")
    for number in range(60):
        await brief.submit(f"d{number}", dead)
        await brief.submit(f"p{number}", restarted)
    await brief.claim(dead)
    await brief.claim(restarted)
    await brief.perish(dead)
    await brief.perish(restarted)
    now = await brief.worker("w1")
    beating = asyncio.create_task(brief.beat(now))
    others = [await connect(BrokerConfig(broker.config.url, broker.keys.namespace)) for _ in range(6)]
    reapers = [Jobs(other, lease_ttl_ms=SHORT_TTL_MS) for other in others]

    counts: Counter[str] = Counter()
    async with asyncio.timeout(10):
        while counts.total() < 120:
            for ended in await asyncio.gather(*(reaper.end_orphans() for reaper in reapers)):
                counts.update(ended)
    assert set(counts.values()) == {1}
    for request_id in counts:
        assert len(await brief.log(request_id)) == 1, request_id
    assert await brief.load(dead) == await brief.load(restarted) == (0, 0)
    beating.cancel()
    for other in others:
        await other.close()


async def test_a_lease_that_vanished_lately_is_waited_for(brief: Stage, broker: Broker) -> None:
    worker = await brief.worker()
    await brief.running("r1", worker)
    await brief.registry.renew(worker)
    await broker.call("DEL", broker.keys.worker("w0"))
    assert await brief.jobs.end_orphans() == []
    assert (await brief.registry.renew(worker)).held_lease
    record = await brief.record("r1")
    assert record.state == "running"


async def test_what_the_living_have_is_safe_from_an_old_look(brief: Stage, broker: Broker) -> None:
    """A gateway may have read a stream long before it acts: what counts is what the script then finds."""
    worker = await brief.worker()
    beating = asyncio.create_task(brief.beat(worker))
    await brief.running("running", worker)
    await brief.submit("queued", worker)
    entries = await broker.call("XRANGE", broker.keys.jobs("w0"), "-", "+")
    names = [broker.keys.workers, broker.keys.worker("w0"), broker.keys.jobs("w0")]
    args: list[object] = [GROUP, broker.keys.prefix, 1000, "w0", SHORT_TTL_MS, 4]
    for entry_id, fields in entries:
        request_id = fields[b"request"].decode()
        names += [broker.keys.job(request_id), broker.keys.log(request_id)]
        args += [entry_id, b""]
    assert await broker.script("orphans", names, args) == [b"alive"]
    assert await brief.load(worker) == (2, 20)
    beating.cancel()


async def test_entries_that_name_no_job_do_not_stop_it(brief: Stage, broker: Broker) -> None:
    worker = await brief.worker()
    stream = broker.keys.jobs("w0")
    for fields in (("request", "nobody"), ("something", "else"), ("request", b"\xff")):
        await broker.call("XADD", stream, "*", *fields, retry=False)
    await brief.submit("wrong type", worker)
    await brief.submit("wrong log", worker)
    await brief.submit("good", worker)
    await broker.call("SET", broker.keys.job("wrong type"), "x")
    await broker.call("SET", broker.keys.log("wrong log"), "x")
    await brief.perish(worker)
    assert await brief.jobs.end_orphans() == ["wrong log", "good"]
    assert await broker.call("EXISTS", stream, broker.keys.workers) == 0
    await broker.call("DEL", broker.keys.job("wrong type"), broker.keys.load("w0", worker.incarnation))


async def test_one_workers_broken_keys_do_not_stop_the_others(brief: Stage, broker: Broker) -> None:
    worker = await brief.worker("w5")
    await brief.submit("r1", worker)
    for bad in ("w1", "w8"):
        await broker.call("ZADD", broker.keys.workers, 1, bad)
    await broker.call("SET", broker.keys.worker("w1"), "no hash")
    await broker.call("SET", broker.keys.jobs("w8"), "no stream")
    await brief.perish(worker)
    assert await brief.jobs.end_orphans() == ["r1"]
    assert broker.malformed >= 2
    await broker.call("DEL", broker.keys.worker("w1"), broker.keys.jobs("w8"))


async def test_pending_entries_that_were_trimmed(brief: Stage, broker: Broker) -> None:
    past = await brief.worker()
    await brief.running("r1", past)
    await broker.call("XTRIM", broker.keys.jobs("w0"), "MAXLEN", "=", 0)
    await brief.perish(past)
    now = await brief.worker()
    assert (await brief.registry.renew(now)).held_lease
    assert await brief.jobs.end_orphans() == []
    assert (await broker.call("XPENDING", broker.keys.jobs("w0"), GROUP))["pending"] == 0
