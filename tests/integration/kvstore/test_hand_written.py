"""What somebody wrote to Redis by hand: jobs beyond every bound that a gateway checks, and loads that are none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.block_hash import TOKEN_BYTES
from kvstore.jobs import Commit, Finished, Rehomed, Submitted
from kvstore.limits import MAX_JOB_BYTES, MAX_REST_BYTES
from kvstore.registry import Load
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Stage, chunk, job

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo


async def test_what_no_gateway_lets_through_is_ended_with_its_reason_and_harms_no_other(
    stage: Stage, broker: Broker
) -> None:
    """Written to Redis by hand: stop strings of ten megabytes. The longest payloads do not even leave the server."""
    worker = await stage.worker(context_length=1000)
    stops, bare = job("stops"), job("long")
    stops.stopping.stop.extend(["x" * 300] * 2)
    stops_payload, long_payload = stops.SerializeToString(), bytearray(bare.SerializeToString())
    long_payload += job_pb2.Job(stopping={"stop": ["x" * 200_000] * 50}).SerializeToString()
    for request_id, payload in (
        ("good", None),
        ("stops", stops_payload),
        ("long", bytes(long_payload)),
        ("next", None),
    ):
        await stage.submit(request_id, worker)
        if payload is not None:
            await broker.call("HSET", broker.keys.job(request_id), "payload", payload)
    assert [claim.job.request_id for claim in await stage.claim(worker)] == ["good", "next"]
    for request_id, reason in (
        ("stops", "stopping.stop (bytes of one) is 300, of 256 at most"),
        ("long", f"its payload has {len(long_payload)} bytes, more than its worker's context has room for"),
    ):
        (delivery,) = await stage.log(request_id)
        assert delivery.failure == job_pb2.FAILURE_INTERNAL
        assert delivery.chunk.error == f"the job in the broker is damaged: {reason}"
    assert broker.malformed == 2
    with pytest.raises(ValueError, match=r"no gateway lets such a job through: stopping\.stop "):
        await stage.jobs.submit(
            stops,
            digest=b"d",
            worker=worker.id,
            worker_incarnation=worker.incarnation,
            gateway=stage.gateway,
            deadline_ms=None,
            max_queue=8,
        )


@pytest.mark.parametrize("context", ["1000", "many", None])
async def test_a_payload_may_be_as_long_as_the_workers_context_has_room_for(
    stage: Stage, broker: Broker, context: str | None
) -> None:
    """Where Redis does not know it, because the lease has lapsed or is not ours, up to what any job may have."""
    worker = await stage.worker(context_length=1000)
    most = MAX_REST_BYTES + 1000 * TOKEN_BYTES if context == "1000" else MAX_JOB_BYTES
    for request_id, size in (("exact", most), ("more", most + 1)):
        await stage.submit(request_id, worker)
        # Bytes of a field that nobody knows pad a message.
        payload = job(request_id).SerializeToString()
        payload += b"\xfa\x7f" + varint(size - len(payload) - 6) + b"\0" * (size - len(payload) - 6)
        assert len(payload) == size
        await broker.call("HSET", broker.keys.job(request_id), "payload", payload)
    lease = broker.keys.worker(worker.id)
    await (broker.call("DEL", lease) if context is None else broker.call("HSET", lease, "context_length", context))
    assert [claim.job.request_id for claim in await stage.claim(worker)] == ["exact"]


def varint(number: int) -> bytes:
    """In exactly four bytes."""
    return bytes([number & 127 | 128, number >> 7 & 127 | 128, number >> 14 & 127 | 128, number >> 21])


JUNK_LOADS = {
    "string": ("SET", "junk"),
    "list": ("RPUSH", "junk"),
    **{
        f"{field} {value[:20]}": ("HSET", field, value)
        for field in ("jobs", "sequences", "tokens", "prefill")
        for value in ("junk", "1.5", "9223372036854775807", "007", "-3", "9" * 5000, "")
    },
}


async def spoil(broker: Broker, worker: WorkerInfo, junk: tuple[str, ...]) -> None:
    """Writes over a worker's load what is none."""
    key = broker.keys.load(worker.id, worker.incarnation)
    command, *given = junk
    await broker.call("DEL", key)
    await broker.call(command, key, *given)


@pytest.mark.parametrize("junk", JUNK_LOADS.values(), ids=JUNK_LOADS)
async def test_a_load_that_is_none_stops_nothing(stage: Stage, broker: Broker, junk: tuple[str, ...]) -> None:
    """Whoever charges or refunds finds it, in the middle of what it does; no job may be left half-way."""
    rates: dict[str, Any] = {"prefill_tok_s": 100.0, "max_running": 1}
    worker, other = await stage.worker("w0", **rates), await stage.worker("w1", **rates)
    await spoil(broker, worker, junk)
    for number in range(4):
        assert await stage.submit(f"r{number}", worker, prefill=3) is Submitted.ACCEPTED
    assert (await stage.registry.loads([worker]))["w0"] == Load(4, 40, 12, 4)

    # A thief finds its victim's load, and its own.
    for life in (worker, other):
        await spoil(broker, life, junk)
    assert await stage.jobs.steal("w1", other.incarnation, "w0", prefill_s_per_token=1e-6) == 1
    assert (await stage.registry.loads([other]))["w1"] == Load(1, 10, 3, 1)

    # An end from outside, a first token, a last one.
    assert len(await stage.claim(worker)) == 3
    await spoil(broker, worker, junk)
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    await spoil(broker, worker, junk)
    assert await stage.commit(worker, chunk("r2", 0, [1]), chunk("r3", 0, [1])) == [Commit.WRITTEN] * 2
    await spoil(broker, worker, junk)
    step = [chunk(name, 1, [2], finish=inference_pb2.STOP) for name in ("r2", "r3")]
    assert await stage.commit(worker, *step) == [Commit.WRITTEN] * 2
    assert await stage.load(worker) == (0, 0)
    assert (await stage.registry.renew(worker)).held_lease


@pytest.mark.parametrize("junk", [*JUNK_LOADS.values(), ("HSET", "jobs", "500", "tokens", "90000")])
async def test_an_idle_worker_is_charged_with_nothing(stage: Stage, broker: Broker, junk: tuple[str, ...]) -> None:
    """Only when nothing is in its stream and it says that it has nothing: a job may have come a moment ago."""
    worker = await stage.worker()
    load = broker.keys.load(worker.id, worker.incarnation)
    await stage.submit("r1", worker, prefill=3)
    await stage.registry.renew(worker)
    assert await stage.load(worker) == (1, 10)
    await stage.claim(worker)
    await stage.registry.renew(worker)
    assert await stage.load(worker) == (1, 10)
    assert await stage.jobs.cancel("r1") is Finished.ENDED

    await spoil(broker, worker, junk)
    for busy in (replace(worker, running=1), replace(worker, waiting=1)):
        await stage.registry.renew(busy)
        assert await broker.call("EXISTS", load) == 1
    await stage.registry.renew(worker)
    assert await broker.call("EXISTS", load) == 0


@pytest.mark.parametrize("junk", [("SET", "junk"), ("HSET", "jobs", "junk", "prefill", "1.5")], ids=["string", "hash"])
async def test_a_load_that_is_none_does_not_outlive_its_worker(
    stage: Stage, broker: Broker, junk: tuple[str, ...]
) -> None:
    past = await stage.worker()
    await stage.submit("r1", past, prefill=3)
    await stage.submit("r2", past, prefill=3)
    await stage.registry.leave(past.id, past.incarnation)
    now = await stage.worker()
    for life in (past, now):
        await spoil(broker, life, junk)
    assert [claim.job.request_id for claim in await stage.claim(now)] == ["r1", "r2"]
    assert await stage.load(now) == (2, 20)
    await spoil(broker, now, junk)
    await stage.registry.leave(now.id, now.incarnation)
    assert await stage.rehome(await stage.worker("w1")) == dict.fromkeys(["r1", "r2"], Rehomed.MOVED)
    assert await stage.jobs.orphans() == []
    for life in (past, now):
        assert await broker.call("EXISTS", broker.keys.load(life.id, life.incarnation)) == 0
