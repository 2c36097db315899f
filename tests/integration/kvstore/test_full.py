"""A server that has reached maxmemory: new work is refused, work that runs ends well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import BlockHash
from kvstore.client import Broker, BrokerConfig, connect
from kvstore.dead import DeadJobs
from kvstore.embedded import EmbeddedBroker
from kvstore.errors import BrokerFull, RequestIdTaken
from kvstore.jobs import Commit, Finished, Rehomed, Submitted, Target
from kvstore.prefix_index import HeldChange, PrefixIndex, short
from kvstore.registry import ModelCard, new_incarnation
from octavo.v1 import inference_pb2

from .conftest import LONG_TTL_MS, Stage, chunk, on_both_servers, set_stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = on_both_servers


@pytest.fixture
async def stage(broker_binary: Path, namespace: str) -> AsyncIterator[Stage]:
    """On a server of its own, with room for 8 MB."""
    async with EmbeddedBroker(binary=broker_binary, options={"maxmemory": "8mb"}) as server:
        broker = await connect(BrokerConfig(server.url, namespace))
        async with set_stage(broker, LONG_TTL_MS) as stage:
            yield stage
        await broker.close()


async def test_running_work_ends_and_new_work_is_refused(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("running", worker)
    await stage.submit("queued", worker)
    await stage.submit("cancelled", worker)
    await fill(stage.broker)

    with pytest.raises(BrokerFull, match="is full"):
        await stage.submit("new", worker)
    assert await stage.jobs.get("new") is None
    assert await stage.load(worker) == (3, 30)

    # All that the living need.
    assert (await stage.registry.renew(worker)).held_lease
    await stage.worker("w1")
    await stage.registry.renew_gateway(stage.gateway)
    assert await stage.registry.live_gateways([stage.gateway]) == {stage.gateway}
    assert await stage.jobs.cancel("cancelled") is Finished.ENDED
    (claim,) = await stage.claim(worker)
    assert claim.job.request_id == "queued"
    for request_id in ("running", "queued"):
        step = [chunk(request_id, 0, [1]), chunk(request_id, 1, [2], finish=inference_pb2.STOP)]
        assert await stage.commit(worker, *step) == [Commit.WRITTEN] * 2
        assert await stage.log(request_id) == step
    assert await stage.load(worker) == (0, 0)
    # Nor does the index go blind: it is small, and bounded by the pools.
    index = PrefixIndex(stage.broker, lease_ttl_ms=LONG_TTL_MS)
    hashes = [BlockHash(bytes([number]) * 32) for number in range(100)]
    change = HeldChange(added=tuple(map(short, hashes)))
    assert (await stage.jobs.commit(worker.id, worker.incarnation, [], change)).held_count == 100
    assert await index.replace(worker.id, worker.incarnation, change.added[:9]) == 9
    assert (await index.match([worker], {"f": hashes}))["w0"].blocks == 9
    await stage.registry.leave(worker.id, worker.incarnation)
    await stage.registry.publish_model(ModelCard("f", 1, (), b"{}", b"{}"))
    assert await stage.registry.model("f") is not None

    await drain(stage.broker)
    again = await stage.worker()
    assert await stage.submit("new", again) is Submitted.ACCEPTED


async def test_a_job_that_is_there_already_is_attached_to(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await fill(stage.broker)
    other = new_incarnation()
    assert await stage.submit("r1", worker, gateway=other) is Submitted.ATTACHED
    record = await stage.jobs.get("r1")
    assert record is not None
    assert record.gateway == other
    with pytest.raises(RequestIdTaken):
        await stage.submit("r1", worker, digest=b"other")


async def test_jobs_of_a_worker_that_left_go_on_elsewhere(stage: Stage) -> None:
    """What was accepted is moved, or given up and kept, however full the server is."""
    worker, other = await stage.worker(), await stage.worker("w1")
    for request_id in ("moves", "waits", "poison"):
        await stage.submit(request_id, worker)
    await stage.claim(worker)
    await stage.broker.call("HSET", stage.broker.keys.job("poison"), "deaths", 3, "fruitless", 3)
    await fill(stage.broker)
    await stage.registry.leave(worker.id, worker.incarnation)
    moves, waits, poison = await stage.jobs.orphans()
    target = Target("w1", other.incarnation, 3, 0)
    assert await stage.jobs.rehome(moves, target) is Rehomed.MOVED
    assert await stage.jobs.rehome(waits, None) is Rehomed.WAITING
    assert await stage.jobs.rehome(poison, target) is Rehomed.DEAD
    assert [dead.job.request_id for dead in await DeadJobs(stage.broker).all()] == ["poison"]
    assert (await stage.jobs.ledger()).holds


async def fill(broker: Broker) -> None:
    """Until the server refuses, to the last small value; it stays full whatever of its own memory it gives back."""
    for size in (100_000, 1000, 10):
        full, number = False, 0
        while not full:
            number += 1
            try:
                await broker.call("SET", f"ballast:{size}:{number}", bytes(size))
            except BrokerFull:
                full = True
    await broker.call("CONFIG", "SET", "maxmemory", "4mb")


async def drain(broker: Broker) -> None:
    """Takes the ballast out again."""
    await broker.call("CONFIG", "SET", "maxmemory", "8mb")
    for number in range(100):
        await broker.call("DEL", f"ballast:100000:{number}")
