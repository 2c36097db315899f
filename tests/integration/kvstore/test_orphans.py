"""Finding the jobs of workers that died, left, drain or were restarted."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvstore.client import connect
from kvstore.jobs import Commit, Jobs, JobState, Rehomed, Target
from kvstore.keys import GROUP
from octavo.v1 import inference_pb2, job_pb2

from .conftest import SHORT_TTL_MS, Ear, Stage, chunk, job, settled, until

if TYPE_CHECKING:
    from kvstore.client import Broker

MOVED, STALE = Rehomed.MOVED, Rehomed.STALE


@pytest.fixture(autouse=True)
async def _settled(broker: Broker) -> None:
    await settled(broker)


async def test_a_dead_workers_jobs_go_on_elsewhere(brief: Stage, broker: Broker) -> None:
    """Found by waiting, as gateways do. Elsewhere in this file the waiting is left out: ``Stage.perish``."""
    worker, other = await brief.worker("w0", fingerprint="f0"), await brief.worker("w1", fingerprint="f1")
    beating = asyncio.create_task(brief.beat(other))
    await brief.running("running", worker)
    await brief.commit(worker, chunk("running", 0, [1]))
    await brief.submit("read", worker)
    await brief.entries(worker)
    await brief.submit("queued", worker)
    assert await brief.jobs.orphans() == []

    async with Ear(broker, brief.gateway) as gateway, Ear(broker, worker.incarnation) as owner:
        found = await until(brief.jobs.orphans)
        assert [(one.request_id, one.worker, one.incarnation, one.why) for one in found] == [
            (request_id, "w0", worker.incarnation, "died") for request_id in ("running", "read", "queued")
        ]
        assert {(one.model, one.prompt_tokens, one.longest) for one in found} == {("m", 3, 10)}
        assert [await brief.jobs.orphaned_job(one) for one in found] == [*map(job, ("running", "read", "queued"))]
        assert [(one.state, one.attempt, one.next, one.deaths, one.fingerprint) for one in found] == [
            (JobState.RUNNING, 1, (1,), 1, "f0"),
            (JobState.QUEUED, 0, (0,), 0, "f0"),
            (JobState.QUEUED, 0, (0,), 0, "f0"),
        ]
        assert await brief.rehome(other) == {"running": MOVED, "read": MOVED, "queued": MOVED}
        assert await owner.next() == b"running"
        assert owner.silent()
        assert gateway.silent()

    # If it was only frozen: its writes are refused.
    assert await brief.commit(worker, chunk("running", 1, [2])) == [Commit.FENCED]
    assert await brief.jobs.orphans() == []
    for key in (broker.keys.jobs("w0"), broker.keys.load("w0", worker.incarnation)):
        assert await broker.call("EXISTS", key) == 0
    assert await broker.call("ZRANGE", broker.keys.workers, 0, -1) == [b"w1"]
    claims = await brief.claim(other)
    assert [(claim.job.request_id, claim.attempt, claim.next) for claim in claims] == [
        ("running", 2, (1,)),
        ("read", 1, (0,)),
        ("queued", 1, (0,)),
    ]
    assert await brief.commit(other, chunk("running", 1, [2], attempt=2)) == [Commit.WRITTEN]
    assert (await brief.record("running")).fingerprint == "f1"
    # It comes back as if it were new.
    assert (await brief.registry.renew(worker)).held_lease
    await brief.running("again", worker)
    beating.cancel()


async def test_more_jobs_than_one_batch(stage: Stage, broker: Broker) -> None:
    worker, other = await stage.worker(), await stage.worker("w1")
    ids = [f"r{number}" for number in range(250)]
    for start in range(0, 250, 50):
        await asyncio.gather(*(stage.submit(request_id, worker) for request_id in ids[start : start + 50]))
    await stage.registry.leave(worker.id, worker.incarnation)
    batches = [await stage.rehome(other) for _ in range(4)]
    assert [len(batch) for batch in batches] == [100, 100, 50, 0]
    assert {**batches[0], **batches[1], **batches[2]} == dict.fromkeys(ids, MOVED)
    assert await broker.call("EXISTS", broker.keys.jobs("w0")) == 0
    assert await stage.load(other) == (250, 2500)


async def test_the_living_are_left_alone(mortal: Stage) -> None:
    dead, alive = await mortal.worker("w0"), await mortal.worker("w1")
    await mortal.submit("dead", dead)
    await mortal.running("alive", alive)
    await mortal.submit("queued", alive)
    beating = asyncio.create_task(mortal.beat(alive))
    await mortal.perish(dead)
    assert await mortal.rehome(alive) == {"dead": MOVED}
    for _ in range(5):
        assert await mortal.jobs.orphans() == []
    beating.cancel()
    assert [queue.worker for queue in await mortal.jobs.queues()] == ["w1"]
    assert await mortal.load(alive) == (3, 30)


async def test_what_a_replaced_incarnation_had_read_may_come_back_to_its_successor(
    mortal: Stage, broker: Broker
) -> None:
    """What it had not read is served as if nothing had happened, and earlier: it came earlier."""
    past = await mortal.worker()
    await mortal.running("running", past)
    await mortal.submit("read", past)
    await mortal.entries(past)
    await mortal.submit("queued", past)
    await mortal.perish(past)
    now = await mortal.worker()
    beating = asyncio.create_task(mortal.beat(now))

    assert {one.why for one in await mortal.jobs.orphans()} == {"was restarted"}
    assert await mortal.rehome(now, prefill=3) == {"running": MOVED, "read": MOVED}
    assert await mortal.jobs.orphans() == []
    assert (await mortal.load(past), await mortal.load(now)) == ((1, 10), (2, 20))

    claims = await mortal.claim(now)
    assert [(claim.job.request_id, claim.attempt) for claim in claims] == [("queued", 1), ("running", 2), ("read", 1)]
    # The charge has moved along.
    assert (await mortal.load(past), await mortal.load(now)) == ((0, 0), (3, 30))
    assert await mortal.jobs.orphans() == []
    last = [chunk(claim.job.request_id, 0, [1], attempt=claim.attempt, finish=inference_pb2.STOP) for claim in claims]
    assert await mortal.commit(now, *last) == [Commit.WRITTEN] * 3
    assert await mortal.load(now) == (0, 0)
    consumers = await broker.call("XINFO CONSUMERS", broker.keys.jobs("w0"), GROUP)
    assert [consumer["name"] for consumer in consumers] == [now.incarnation.encode()]
    beating.cancel()


async def test_a_replaced_incarnation_cannot_claim(mortal: Stage) -> None:
    past = await mortal.worker()
    await mortal.submit("r1", past)
    entries = await mortal.entries(past)
    await mortal.perish(past)
    now = await mortal.worker()
    assert await mortal.jobs.claim(past.id, past.incarnation, entries) == []
    record = await mortal.record("r1")
    assert (record.state, record.attempt) == ("queued", 0)
    assert await mortal.rehome(now) == {"r1": MOVED}
    assert await mortal.jobs.claim(past.id, past.incarnation, entries) == []
    assert [claim.attempt for claim in await mortal.claim(now)] == [1]


async def test_many_gateways_move_each_job_once(mortal: Stage, broker: Broker) -> None:
    dead, restarted, other = await mortal.worker("w0"), await mortal.worker("w1"), await mortal.worker("w2")
    for number in range(60):
        await mortal.submit(f"d{number}", dead)
        await mortal.submit(f"p{number}", restarted)
    await mortal.entries(dead)
    await mortal.entries(restarted)
    await mortal.perish(dead)
    await mortal.perish(restarted)
    now = await mortal.worker("w1")
    beating = [asyncio.create_task(mortal.beat(each)) for each in (now, other)]
    others = [await connect(broker.config) for _ in range(6)]

    async def reap(jobs: Jobs) -> list[str]:
        target = Target("w2", other.incarnation, 3, 0)
        found = await jobs.orphans()
        done = await asyncio.gather(*(jobs.rehome(orphan, target) for orphan in found))
        assert set(done) <= {MOVED, STALE}
        return [orphan.request_id for orphan, became in zip(found, done, strict=True) if became is MOVED]

    reapers = [Jobs(each, lease_ttl_ms=SHORT_TTL_MS) for each in others]
    counts: Counter[str] = Counter()
    async with asyncio.timeout(40):
        while counts.total() < 120:
            for moved in await asyncio.gather(*map(reap, reapers)):
                counts.update(moved)
    assert set(counts.values()) == {1}
    assert await mortal.load(dead) == await mortal.load(restarted) == (0, 0)
    assert await mortal.load(other) == (120, 1200)
    assert await broker.call("XLEN", broker.keys.jobs("w2")) == 120
    for task in beating:
        task.cancel()
    for each in others:
        await each.close()


async def test_a_lease_that_vanished_lately_is_waited_for(mortal: Stage, broker: Broker) -> None:
    worker = await mortal.worker()
    await mortal.running("r1", worker)
    await mortal.registry.renew(worker)
    await broker.call("DEL", broker.keys.worker("w0"))
    assert await mortal.jobs.orphans() == []
    assert (await mortal.registry.renew(worker)).held_lease
    record = await mortal.record("r1")
    assert record.state == "running"


async def test_what_the_living_have_is_safe_from_an_old_look(mortal: Stage) -> None:
    """A gateway may have looked long before it acts: what counts is what the script then finds."""
    worker, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.running("running", worker)
    await mortal.submit("queued", worker)
    await mortal.perish(worker)
    found = await mortal.jobs.orphans()
    assert len(found) == 2
    assert (await mortal.registry.renew(worker)).held_lease
    target = Target("w1", other.incarnation, 3, 0)
    assert [await mortal.jobs.rehome(orphan, target) for orphan in found] == [STALE, STALE]
    assert (await mortal.load(worker), await mortal.load(other)) == ((2, 20), (0, 0))
    assert await mortal.commit(worker, chunk("running", 0, [1])) == [Commit.WRITTEN]


async def test_entries_that_name_no_job_do_not_stop_it(mortal: Stage, broker: Broker) -> None:
    worker, other = await mortal.worker(), await mortal.worker("w1")
    stream = broker.keys.jobs("w0")
    for fields in (("request", "nobody"), ("something", "else"), ("request", b"\xff")):
        await broker.call("XADD", stream, "*", *fields, retry=False)
    await mortal.submit("wrong type", worker)
    await mortal.submit("wrong log", worker)
    await mortal.submit("good", worker)
    await broker.call("SET", broker.keys.job("wrong type"), "x")
    await broker.call("SET", broker.keys.log("wrong log"), "x")
    await mortal.perish(worker)
    assert await mortal.rehome(other) == {"wrong log": MOVED, "good": MOVED}
    assert await mortal.jobs.orphans() == []
    assert await broker.call("EXISTS", stream) == 0
    await broker.call("DEL", broker.keys.job("wrong type"), broker.keys.load("w0", worker.incarnation))


async def test_a_job_that_is_not_as_we_write_it_ends(mortal: Stage, broker: Broker) -> None:
    worker, other = await mortal.worker(), await mortal.worker("w1")
    damage = {
        "payload": ("payload", b"\x80\x04pickle"),
        "choices": ("choices", 2**62),
        "no choices": ("choices", 0),
        "other choices": ("choices", 2),
        "charge": ("charge", "much"),
        "index": ("next:0", "many"),
        "attempt": ("attempt", "-1"),
        "fingerprint": ("fingerprint", b"\xff"),
    }
    for request_id, (field, value) in damage.items():
        await mortal.submit(request_id, worker)
        await broker.call("HSET", broker.keys.job(request_id), field, value)
    without = ["no payload", "doomed, without a payload"]
    for deaths, request_id in zip((0, 3), without, strict=True):
        await mortal.submit(request_id, worker)
        await broker.call("HSET", broker.keys.job(request_id), "deaths", deaths)
        await broker.call("HDEL", broker.keys.job(request_id), "payload")
    await mortal.submit("good", worker)
    await mortal.perish(worker)
    assert await mortal.rehome(other) == {"good": MOVED}
    assert await mortal.jobs.orphans() == []
    assert broker.malformed == len(damage) + len(without)
    for request_id in [*damage, *without]:
        (delivery,) = await mortal.log(request_id)
        assert delivery.failure == job_pb2.FAILURE_INTERNAL
        assert delivery.chunk.error.startswith("the job in the broker is damaged: ")
    assert await mortal.load(worker) == (0, 0)


async def test_one_workers_broken_keys_do_not_stop_the_others(
    mortal: Stage, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a line when it begins, however often it is looked, and one when it is over."""
    worker, other = await mortal.worker("w5"), await mortal.worker("w6")
    await mortal.submit("r1", worker)
    for bad in ("w1", "w8"):
        await broker.call("ZADD", broker.keys.workers, 1, bad)
    await broker.call("SET", broker.keys.worker("w1"), "no hash")
    await broker.call("SET", broker.keys.jobs("w8"), "no stream")
    await mortal.perish(worker)
    assert await mortal.rehome(other) == {"r1": MOVED}
    assert broker.malformed >= 2
    assert await mortal.jobs.orphans() == []
    await broker.call("DEL", broker.keys.worker("w1"), broker.keys.jobs("w8"))
    for _ in range(2):
        assert await mortal.jobs.orphans() == []
    told = [each.getMessage() for each in caplog.records if each.name == "kvstore.orphans"]
    assert [each.split(":")[0] for each in sorted(told)] == [
        "looking after the jobs of worker w1 fails, trying again",
        "looking after the jobs of worker w1 works again, after 0 s",
        "looking after the jobs of worker w8 fails, trying again",
        "looking after the jobs of worker w8 works again, after 0 s",
    ]


async def test_pending_entries_that_were_trimmed(mortal: Stage, broker: Broker) -> None:
    past = await mortal.worker()
    await mortal.running("r1", past)
    await broker.call("XTRIM", broker.keys.jobs("w0"), "MAXLEN", "=", 0)
    await mortal.perish(past)
    now = await mortal.worker()
    assert (await mortal.registry.renew(now)).held_lease
    assert await mortal.jobs.orphans() == []
    assert (await broker.call("XPENDING", broker.keys.jobs("w0"), GROUP))["pending"] == 0
