"""Entries that somebody takes from a worker's stream by hand: their jobs are put back, and none is run twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.entries import put_back
from kvstore.errors import BrokerWrongType
from kvstore.jobs import Commit, JobState, Rehomed
from octavo.v1 import inference_pb2

from .conftest import SHORT_TTL_MS, Stage, chunk, on_both_servers, settled

if TYPE_CHECKING:
    from kvstore.client import Broker

pytestmark = on_both_servers

TAKEN = {"deleted": ("DEL", ()), "trimmed": ("XTRIM", ("MAXLEN", 0))}


async def put(stage: Stage, request_id: str) -> bool:
    return await put_back(stage.broker, await stage.record(request_id), lease_ttl_ms=SHORT_TTL_MS)


async def take(broker: Broker, worker: str, how: str) -> None:
    command, more = TAKEN[how]
    await broker.call(command, broker.keys.jobs(worker), *more)


@pytest.mark.parametrize("how", TAKEN)
async def test_what_waits_is_read_after_all_and_once(stage: Stage, broker: Broker, how: str) -> None:
    worker = await stage.worker()
    await stage.submit("read", worker)
    read = await stage.entries(worker)
    await stage.submit("waits", worker)
    assert [await put(stage, name) for name in ("read", "waits")] == [False] * 2
    await take(broker, "w0", how)
    assert [await put(stage, name) for name in ("read", "waits")] == [True] * 2
    assert [await put(stage, name) for name in ("read", "waits")] == [False] * 2
    # What was read before is claimed by the entry that there is now.
    assert await stage.jobs.claim("w0", worker.incarnation, read) == []
    claims = await stage.claim(worker)
    assert [(each.job.request_id, each.attempt) for each in claims] == [("read", 1), ("waits", 1)]
    steps = [chunk(name, 0, [1], finish=inference_pb2.STOP) for name in ("read", "waits")]
    assert await stage.commit(worker, *steps) == [Commit.WRITTEN] * 2
    assert [await put(stage, name) for name in ("read", "waits")] == [False] * 2
    assert (await stage.load(worker), (await stage.jobs.ledger()).in_flight) == ((0, 0), 0)


async def test_an_entry_that_is_none(stage: Stage, broker: Broker) -> None:
    """The job's own is dropped by who reads it, as the job names another one."""
    worker = await stage.worker()
    await stage.submit("r1", worker)
    await broker.call("HSET", broker.keys.job("r1"), "entry", "junk")
    assert await put(stage, "r1")
    assert [claim.attempt for claim in await stage.claim(worker)] == [1]


@pytest.mark.parametrize("how", TAKEN)
async def test_what_runs_is_left_to_its_worker_until_that_dies(mortal: Stage, broker: Broker, how: str) -> None:
    await settled(broker)
    worker, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.running("r1", worker)
    await take(broker, "w0", how)
    assert not await put(mortal, "r1")
    assert await mortal.commit(worker, chunk("r1", 0, [1, 2])) == [Commit.WRITTEN]
    await broker.call("DEL", broker.keys.worker("w0"))
    assert not await put(mortal, "r1")  # it may only be late
    await mortal.perish(worker)
    assert await mortal.rehome(other) == {}  # and the worker, whose stream is empty, is forgotten
    assert await put(mortal, "r1")
    await mortal.perish(worker)
    assert await mortal.rehome(other) == {"r1": Rehomed.MOVED}
    (again,) = await mortal.claim(other)
    assert (again.attempt, again.next) == (2, (2,))
    assert await mortal.commit(worker, chunk("r1", 2, [3])) == [Commit.FENCED]
    record = await mortal.record("r1")
    assert (record.state, record.deaths) == (JobState.RUNNING, 1)


async def test_a_worker_that_comes_back_finds_what_it_had_lost(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await take(broker, "w0", "deleted")
    await broker.call("DEL", broker.keys.worker("w0"))
    life = await stage.worker()
    assert await put(stage, "r1")
    (again,) = await stage.claim(life)
    assert (again.attempt, again.entry_id) == (2, (await stage.record("r1")).entry)


async def test_a_stream_that_is_none_is_named(stage: Stage, broker: Broker) -> None:
    worker, key = await stage.worker(), broker.keys.jobs("w0")
    await stage.running("runs", worker)
    await stage.submit("waits", worker)
    await broker.call("SET", key, "junk")
    assert not await put(stage, "runs")
    with pytest.raises(BrokerWrongType) as caught:
        await put(stage, "waits")
    assert caught.value.keys == (key,)
    await broker.call("DEL", key)
    assert await put(stage, "waits")
    assert [claim.job.request_id for claim in await stage.claim(worker)] == ["waits"]
