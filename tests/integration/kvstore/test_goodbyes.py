"""Jobs of workers that leave in order: they drain, and say goodbye."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Commit, Jobs, JobState, Rehomed, Target
from kvstore.registry import DRAINING, GOODBYE_MS

from .conftest import SHORT_TTL_MS, Stage, chunk, settled

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo

MOVED, STALE, WAITING = Rehomed.MOVED, Rehomed.STALE, Rehomed.WAITING
FENCED, WRITTEN = Commit.FENCED, Commit.WRITTEN


@pytest.fixture(autouse=True)
async def _settled(broker: Broker) -> None:
    await settled(broker)


async def test_a_worker_that_left_with_jobs(mortal: Stage, broker: Broker) -> None:
    """At once: there is nothing to wait for. Nobody has died of them."""
    worker, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.running("r1", worker)
    await mortal.registry.leave(worker.id, worker.incarnation)
    (found,) = await mortal.jobs.orphans()
    assert (found.why, found.state, found.deaths) == ("left", JobState.RUNNING, 0)
    assert await mortal.rehome(other) == {"r1": MOVED}
    assert await mortal.jobs.orphans() == []
    assert await broker.call("EXISTS", broker.keys.jobs("w0")) == 0


async def test_a_worker_that_left_and_came_back_has_not_died(mortal: Stage) -> None:
    past = await mortal.worker()
    await mortal.running("r1", past)
    await mortal.registry.leave(past.id, past.incarnation)
    now = await mortal.worker()
    (found,) = await mortal.jobs.orphans()
    assert (found.why, found.deaths) == ("was restarted", 0)
    assert await mortal.rehome(now) == {"r1": MOVED}


async def test_of_a_draining_worker_what_it_has_not_begun(stage: Stage, broker: Broker) -> None:
    worker, other = await stage.worker(), await stage.worker("w1")
    await stage.running("begun", worker)
    await stage.commit(worker, chunk("begun", 0, [1]))
    await stage.running("claimed", worker)
    await stage.submit("read", worker)
    (entry,) = await stage.entries(worker)
    await stage.submit("queued", worker)
    assert await stage.jobs.orphans() == []
    await drain(stage, worker)
    found = {each.request_id: (each.why, each.kept, each.deaths) for each in await stage.jobs.orphans()}
    told = "is draining"
    assert found == {"claimed": (told, True, 0), "read": (told, False, 0), "queued": (told, False, 0)}
    assert await stage.rehome(other) == dict.fromkeys(found, MOVED)
    assert await stage.jobs.orphans() == []
    # What it had read, and may claim or tell of by now, is not its own any more.
    assert await stage.jobs.claim(worker.id, worker.incarnation, [entry]) == []
    assert await stage.commit(worker, chunk("claimed", 0, [1]), chunk("begun", 1, [2])) == [FENCED, WRITTEN]
    assert [claim.attempt for claim in await stage.claim(other)] == [2, 1, 1]
    assert (await stage.load(worker), await stage.load(other)) == ((1, 10), (3, 30))
    queues = [(queue.undelivered, queue.pending) for queue in await stage.jobs.queues()]
    assert queues == [(0, 1), (0, 3)]


async def test_a_draining_worker_that_tells_of_a_token_keeps_the_job(stage: Stage) -> None:
    worker, other = await stage.worker(), await stage.worker("w1")
    await stage.running("r1", worker)
    await drain(stage, worker)
    (found,) = await stage.jobs.orphans()
    await stage.commit(worker, chunk("r1", 0, [1]))
    assert await stage.jobs.rehome(found, Target("w1", other.incarnation, 3, 0)) is STALE
    assert await stage.commit(worker, chunk("r1", 1, [2])) == [WRITTEN]


async def test_what_nobody_else_can_run_is_left_to_a_draining_worker(stage: Stage, broker: Broker) -> None:
    """However long it takes, and however often it was claimed before."""
    worker, jobs = await stage.worker(), Jobs(stage.broker, orphan_wait_s=-1.0)
    await stage.running("r1", worker)
    await stage.running("tenth", worker)
    await broker.call("HSET", broker.keys.job("tenth"), "fruitless", 9)
    await drain(stage, worker)
    for _ in range(2):
        found = await jobs.orphans()
        assert {each.request_id: each.doomed for each in found} == {"r1": False, "tenth": True}
        assert [await jobs.rehome(each, None) for each in found] == [WAITING, WAITING]
    assert await stage.commit(worker, chunk("r1", 0, [1])) == [WRITTEN]
    await stage.registry.leave(worker.id, worker.incarnation)
    assert {each.request_id for each in await jobs.orphans()} == {"r1", "tenth"}


async def test_of_many_that_a_draining_worker_has_read_the_last_are_found(stage: Stage) -> None:
    worker = await stage.worker()
    names = [f"r{index:03d}" for index in range(110)]
    for name in names:
        await stage.submit(name, worker)
    await stage.claim(worker)
    await stage.claim(worker)
    await stage.commit(worker, *(chunk(name, 0, [1]) for name in names[:105]))
    await drain(stage, worker)
    looks = [[each.request_id for each in await stage.jobs.orphans()] for _ in range(2)]
    assert looks == [[], names[105:]]


async def test_a_draining_worker_that_never_read(stage: Stage) -> None:
    """Its stream has no group yet."""
    worker, other = await stage.worker(), await stage.worker("w1")
    await stage.submit("r1", worker)
    await drain(stage, worker)
    assert await stage.rehome(other) == {"r1": MOVED}


async def test_a_draining_worker_that_reads_after_all_may_not_claim_what_has_moved(stage: Stage) -> None:
    worker, other = await stage.worker(), await stage.worker("w1")
    await stage.submit("r1", worker)
    await drain(stage, worker)
    (found,) = await stage.jobs.orphans()
    entries = await stage.entries(worker)
    assert await stage.jobs.rehome(found, Target("w1", other.incarnation, 3, 0)) is MOVED
    assert await stage.jobs.claim(worker.id, worker.incarnation, entries) == []


async def drain(stage: Stage, worker: WorkerInfo) -> None:
    """As a worker's last heartbeats do."""
    assert (await stage.registry.renew(replace(worker, state=DRAINING))).held_lease


async def test_a_worker_that_broke_leaves_without_a_goodbye(mortal: Stage, broker: Broker) -> None:
    """Its jobs move at once, and what had few tokens there may be what it died of."""
    worker, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.running("poison", worker)
    await mortal.running("neighbour", worker)
    await mortal.commit(worker, chunk("neighbour", 0, [1] * 16))
    await mortal.submit("unread", worker)
    await mortal.registry.leave(worker.id, worker.incarnation, goodbye=False)
    assert await broker.call("EXISTS", broker.keys.worker("w0")) == 0
    assert 0 < await broker.call("PTTL", broker.keys.left("w0", worker.incarnation)) <= GOODBYE_MS
    orphans = await mortal.jobs.orphans()
    found = {each.request_id: (each.why, each.deaths) for each in orphans}
    assert found == {"poison": ("broke", 1), "neighbour": ("broke", 0), "unread": ("broke", 0)}
    hasty = Jobs(mortal.broker, lease_ttl_ms=SHORT_TTL_MS, orphan_wait_s=-1.0)
    (unread,) = [each for each in orphans if each.request_id == "unread"]
    assert await hasty.rehome(unread, None) is Rehomed.ENDED
    (end,) = await mortal.log("unread")
    assert end.chunk.error == "worker w0 broke, and for -1 s there was no other to run it"
    assert set((await mortal.rehome(other)).values()) == {MOVED}
    assert (await mortal.record("poison")).deaths == 1


async def test_a_worker_that_breaks_while_it_drains_has_said_goodbye(mortal: Stage) -> None:
    worker = await mortal.worker()
    await mortal.running("r1", worker)
    await drain(mortal, worker)
    await mortal.registry.leave(worker.id, worker.incarnation, goodbye=False)
    (found,) = await mortal.jobs.orphans()
    assert (found.why, found.deaths) == ("left", 0)


async def test_a_worker_that_is_killed_while_it_drains_has_not_died_of_what_it_ran(
    mortal: Stage, broker: Broker
) -> None:
    worker, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.running("r1", worker)
    goodbye = broker.keys.left("w0", worker.incarnation)
    assert (await mortal.registry.renew(worker)).held_lease
    assert await broker.call("EXISTS", goodbye) == 0
    assert (await mortal.registry.renew(replace(worker, state=DRAINING))).held_lease
    assert 0 < await broker.call("PTTL", goodbye) <= GOODBYE_MS
    await mortal.perish(worker)
    (found,) = await mortal.jobs.orphans()
    assert (found.why, found.deaths) == ("died", 0)
    assert await mortal.rehome(other) == {"r1": MOVED}
    assert (await mortal.record("r1")).deaths == 0


async def test_of_a_worker_that_left_with_nothing_no_goodbye_is_kept(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.registry.renew(replace(worker, state=DRAINING))
    await stage.registry.leave(worker.id, worker.incarnation)
    assert await broker.call("EXISTS", broker.keys.left("w0", worker.incarnation), broker.keys.worker("w0")) == 0


async def test_who_leaves_a_stream_of_another_type_says_goodbye_too(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await broker.call("SET", broker.keys.jobs("w0"), "not ours")
    await stage.registry.leave(worker.id, worker.incarnation)
    assert await broker.call("EXISTS", broker.keys.worker("w0")) == 0
    assert float(await broker.call("ZSCORE", broker.keys.workers, "w0")) == 0
    assert await broker.call("EXISTS", broker.keys.left("w0", worker.incarnation)) == 1
    await broker.call("DEL", broker.keys.jobs("w0"))
