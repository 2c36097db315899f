"""Recorded decisions, read from real servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.replay_records import last_route, records_from_redis
from octavo.v1 import fleet_pb2

if TYPE_CHECKING:
    import pytest

    from kvstore.client import Broker


async def test_the_last_decisions_are_read_oldest_first(
    broker: Broker, broker_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await records_from_redis(broker_url, namespace) == []
    assert await last_route(broker_url, namespace) == "0-0"
    made = [fleet_pb2.RouteRecord(request_id=f"r{index}", policy="prefix") for index in range(5)]
    for record in made[:4]:
        await broker.call("XADD", broker.keys.routes, "*", "d", record.SerializeToString())
    fourth = await last_route(broker_url, namespace)
    assert await records_from_redis(broker_url, namespace, after=fourth) == []
    # Neither of these is a decision: one has no such field, the other bytes of something else.
    await broker.call("XADD", broker.keys.routes, "*", "x", b"1")
    await broker.call("XADD", broker.keys.routes, "*", "d", b"\xff\xff")
    await broker.call("XADD", broker.keys.routes, "*", "d", made[4].SerializeToString())
    await broker.call("PEXPIRE", broker.keys.routes, 60_000)
    assert await records_from_redis(broker_url, namespace) == made
    assert caplog.text.count("a recorded decision does not parse") == 2
    assert await records_from_redis(broker_url, namespace, most=1) == made[4:]
    assert await records_from_redis(broker_url, namespace, after="0-0") == made
    assert await records_from_redis(broker_url, namespace, after=fourth) == made[4:]
    assert await records_from_redis(broker_url, f"{namespace}-other") == []
