"""What is kept of jobs that too many workers died of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import dead, rehoming
from kvstore.dead import DeadJobs
from kvstore.jobs import Rehomed
from octavo.v1 import job_pb2

from .conftest import Stage, job

if TYPE_CHECKING:
    import pytest

    from kvstore.client import Broker


async def bury(broker: Broker, request_id: str, died_ms: int, reason: str = "") -> job_pb2.DeadJob:
    """As rehome.lua does."""
    record = job_pb2.DeadJob(job=job(request_id), reason=reason, attempts=3, worker="w0", died_unix_ms=died_ms)
    await broker.call("HSET", broker.keys.dead, request_id, record.SerializeToString())
    await broker.call("ZADD", broker.keys.dead_times, died_ms, request_id)
    for key in (broker.keys.dead, broker.keys.dead_times):
        await broker.call("PEXPIRE", key, 60_000)
    return record


async def ids(broker: Broker) -> list[str]:
    return [each.job.request_id for each in await DeadJobs(broker).all()]


async def test_the_latest_first_and_each_by_its_id(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead, "_PAGE", 2)
    graves = DeadJobs(broker)
    assert await graves.all() == []
    assert await graves.get("a") is None
    for died_ms, request_id in enumerate(("a", "b", "c", "d", "e"), 7):
        await bury(broker, request_id, died_ms)
    again = await bury(broker, "b", 20, "again")
    assert await ids(broker) == ["b", "e", "d", "c", "a"]
    assert await graves.get("b") == again


async def test_one_is_found_without_a_look_at_the_others(broker: Broker) -> None:
    """However large they are."""
    await bury(broker, "a", 1)
    await bury(broker, "b", 2)
    await broker.call("HSET", broker.keys.dead, "b", b"\x80\x04pickle")
    found = await DeadJobs(broker).get("a")
    assert (found is not None, broker.malformed) == (True, 0)


async def test_dropping(broker: Broker) -> None:
    graves = DeadJobs(broker)
    for request_id in ("a", "b", "c"):
        await bury(broker, request_id, 1)
    assert await graves.drop("nobody") == 0
    assert (await graves.drop("a"), await graves.get("a")) == (1, None)
    assert await ids(broker) == ["c", "b"]
    assert await graves.drop() == 2
    assert await graves.drop() == 0
    assert await broker.call("EXISTS", broker.keys.dead, broker.keys.dead_times) == 0


async def test_entries_that_are_no_dead_jobs(broker: Broker) -> None:
    other = await bury(broker, "a", 1)
    for request_id, data in (("b", b"\x80\x04pickle"), ("c", b""), ("d", other.SerializeToString())):
        await bury(broker, request_id, 2)
        await broker.call("HSET", broker.keys.dead, request_id, data)
    await bury(broker, "gone", 3)
    await broker.call("HDEL", broker.keys.dead, "gone")
    assert await ids(broker) == ["a"]
    assert broker.malformed == 3
    assert await DeadJobs(broker).get("d") is None


async def test_the_oldest_make_room(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehoming, "most_kept", lambda _: 3)
    broker = stage.broker
    for request_id in ("old1", "old2", "old3", "old4"):
        await bury(broker, request_id, int(request_id[-1]))
    worker = await stage.worker()
    await stage.submit("poison", worker)
    await stage.claim(worker)
    await broker.call("HSET", broker.keys.job("poison"), "deaths", 3, "fruitless", 3)
    await stage.registry.leave(worker.id, worker.incarnation)
    (orphan,) = await stage.jobs.orphans()
    assert await stage.jobs.rehome(orphan, None) is Rehomed.DEAD
    assert await ids(broker) == ["poison", "old4", "old3"]
    assert await broker.call("HLEN", broker.keys.dead) == 3
    for key in (broker.keys.dead, broker.keys.dead_times):
        assert 0 < await broker.call("PTTL", key) <= dead.DEAD_TTL_MS
