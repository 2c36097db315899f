"""What is kept of jobs that too many workers died of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import dead
from kvstore.dead import DeadJobs
from octavo.v1 import job_pb2

from .conftest import job

if TYPE_CHECKING:
    import pytest

    from kvstore.client import Broker


async def bury(broker: Broker, request_id: str, reason: str = "") -> None:
    """As rehome.lua does."""
    record = job_pb2.DeadJob(job=job(request_id), reason=reason, attempts=3, worker="w0", died_unix_ms=7)
    await broker.call("XADD", broker.keys.dead, "*", "d", record.SerializeToString(), retry=False)
    await broker.call("PEXPIRE", broker.keys.dead, 60_000)


async def test_the_latest_first_and_each_by_its_id(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead, "_PAGE", 2)
    graves = DeadJobs(broker)
    assert await graves.find() == []
    assert await graves.get("a") is None
    for request_id, reason in (("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")):
        await bury(broker, request_id, reason)
    assert [one.record.reason for one in await graves.find()] == ["4", "3", "2", "1"]
    assert [one.record.reason for one in await graves.find("a")] == ["3", "1"]
    latest = await graves.get("a")
    assert latest is not None
    assert latest.record == job_pb2.DeadJob(job=job("a"), reason="3", attempts=3, worker="w0", died_unix_ms=7)


async def test_dropping(broker: Broker) -> None:
    graves = DeadJobs(broker)
    for request_id in ("a", "b", "a", "c"):
        await bury(broker, request_id)
    assert await graves.drop("nobody") == 0
    assert await graves.drop("a") == 2
    assert [one.record.job.request_id for one in await graves.find()] == ["c", "b"]
    assert await graves.drop() == 2
    assert await graves.drop() == 0
    assert await graves.find() == []


async def test_entries_that_are_no_dead_jobs(broker: Broker) -> None:
    await bury(broker, "a")
    for fields in (("d", b"\x80\x04pickle"), ("d", b""), ("x", "y")):
        await broker.call("XADD", broker.keys.dead, "*", *fields, retry=False)
    assert [one.record.job.request_id for one in await DeadJobs(broker).find()] == ["a"]
    assert broker.malformed == 3
    assert await DeadJobs(broker).drop() == 4
