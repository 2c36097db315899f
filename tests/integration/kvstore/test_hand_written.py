"""Jobs that somebody wrote to Redis by hand, beyond every bound that a gateway checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.limits import MAX_JOB_BYTES, MAX_REST_BYTES, MAX_TOKEN_BYTES
from octavo.v1 import job_pb2

from .conftest import Stage, job

if TYPE_CHECKING:
    from kvstore.client import Broker


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
    most = MAX_REST_BYTES + 1000 * MAX_TOKEN_BYTES if context == "1000" else MAX_JOB_BYTES
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
