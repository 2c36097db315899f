"""Jobs that are ended from outside their worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Finished, JobState
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Ear, Stage, chunk, on_both_servers

if TYPE_CHECKING:
    from kvstore.client import Broker

pytestmark = on_both_servers


async def test_finish_rings_gateway_and_owner(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await stage.commit(worker, chunk("r1", 0, [1]))
    async with Ear(broker, stage.gateway) as gateway, Ear(broker, worker.incarnation) as owner:
        done = await stage.jobs.finish(
            "r1", finish=inference_pb2.ERROR, failure=job_pb2.FAILURE_DEADLINE, error="too late", expect_attempt=1
        )
        assert done is Finished.ENDED
        (delivery,) = await gateway.deliveries()
        assert await owner.next() == b"r1"
    assert (delivery.request_id, delivery.attempt, delivery.failure) == ("r1", 0, job_pb2.FAILURE_DEADLINE)
    assert (delivery.chunk.finish, delivery.chunk.error) == (inference_pb2.ERROR, "too late")
    assert not delivery.HasField("usage")
    assert await stage.log("r1") == [chunk("r1", 0, [1]), delivery]
    record = await stage.record("r1")
    assert (record.state, record.next, record.attempt) == (JobState.ENDED, {0: 1}, 1)
    assert await stage.load(worker) == (0, 0)
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 0


async def test_finish_answers(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    late = partial(stage.jobs.finish, finish=inference_pb2.ERROR, failure=job_pb2.FAILURE_DEADLINE, error="")
    assert await late("r2") is Finished.UNKNOWN
    assert await late("r1", expect_attempt=2) is Finished.FENCED
    assert await late("r1", expect_gateway="other") is Finished.FENCED
    assert await late("r1", expect_attempt=1, expect_gateway=stage.gateway) is Finished.ENDED
    assert await late("r1") is Finished.ALREADY
    assert await stage.jobs.cancel("r1") is Finished.ALREADY
    assert len(await stage.log("r1")) == 1


@pytest.mark.parametrize("when", ["undelivered", "read", "running"])
async def test_cancel_at_each_phase(stage: Stage, broker: Broker, when: str) -> None:
    worker = await stage.worker()
    await stage.submit("other", worker)
    await stage.claim(worker)
    await stage.submit("r1", worker)
    entries = await stage.entries(worker) if when != "undelivered" else []
    if when == "running":
        await stage.jobs.claim(worker.id, worker.incarnation, entries)
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    assert await stage.jobs.claim(worker.id, worker.incarnation, entries) == []
    assert await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 10, 1) == []
    assert await stage.load(worker) == (1, 10)
    (queue,) = await stage.jobs.queues()
    assert (queue.undelivered, queue.pending) == (0, 1)
