"""The ledger counts each job once, in whatever way it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Finished, Ledger, Rehomed, Submitted
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Stage, chunk, settled

if TYPE_CHECKING:
    from kvstore.client import Broker

ERROR = inference_pb2.ERROR


async def test_each_end_has_its_place(stage: Stage) -> None:
    worker = await stage.worker()
    assert await stage.jobs.ledger() == Ledger(0, 0, 0, 0, 0, 0, 0)
    ids = ["stop", "length", "invalid", "late", "cancelled", "deadline", "gone", "open", "queued"]
    for request_id in ids:
        await stage.submit(request_id, worker, n=2)
        assert await stage.submit(request_id, worker) is Submitted.ATTACHED
    assert await stage.jobs.ledger() == Ledger(9, 0, 0, 0, 0, 0, 9)
    await stage.claim(worker)

    def last(
        request_id: str, finish: inference_pb2.FinishReason, failure: job_pb2.Failure = job_pb2.FAILURE_NONE
    ) -> list[job_pb2.Delivery]:
        """Of both choices; how the second one ends is how the job ends."""
        step = [chunk(request_id, 0, [1], finish=inference_pb2.STOP), chunk(request_id, 0, [], choice=1, finish=finish)]
        step[1].failure = failure
        return step

    step = [
        *last("stop", inference_pb2.STOP),
        *last("length", inference_pb2.LENGTH),
        *last("invalid", ERROR, job_pb2.FAILURE_INVALID),
        *last("late", ERROR, job_pb2.FAILURE_DEADLINE),
        chunk("open", 0, [1], finish=inference_pb2.STOP),
    ]
    for _ in range(2):
        await stage.commit(worker, *step)
    assert await stage.jobs.ledger() == Ledger(9, 2, 1, 0, 1, 0, 5)
    assert await stage.jobs.cancel("cancelled") is Finished.ENDED
    assert await stage.jobs.cancel("cancelled") is Finished.ALREADY
    for request_id, failure in (("deadline", job_pb2.FAILURE_DEADLINE), ("gone", job_pb2.FAILURE_UNAVAILABLE)):
        await stage.jobs.finish(request_id, finish=ERROR, failure=failure, error="")
    found = await stage.jobs.ledger()
    assert found == Ledger(9, 2, 2, 1, 2, 0, 2)
    assert (found.holds, found.ended) == (True, 7)


async def test_what_is_refused_is_not_counted(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker)
    with pytest.raises(Exception, match="full"):
        await stage.submit("r2", worker, max_queue=1)
    with pytest.raises(Exception, match="taken"):
        await stage.submit("r1", worker, digest=b"other")
    assert await stage.jobs.ledger() == Ledger(1, 0, 0, 0, 0, 0, 1)


async def test_the_dead_and_those_that_moved(mortal: Stage, broker: Broker) -> None:
    await settled(broker)
    worker, other = await mortal.worker("w0"), await mortal.worker("w1")
    for request_id in ("poison", "moves"):
        await mortal.submit(request_id, worker)
    await mortal.claim(worker)
    await broker.call("HSET", broker.keys.job("poison"), "deaths", 2, "fruitless", 2)
    await mortal.perish(worker)
    assert await mortal.jobs.ledger() == Ledger(2, 0, 0, 0, 0, 0, 2)
    assert await mortal.rehome(other) == {"poison": Rehomed.DEAD, "moves": Rehomed.MOVED}
    assert await mortal.jobs.ledger() == Ledger(2, 0, 0, 0, 0, 1, 1)


async def test_a_job_that_vanished_is_missing(stage: Stage, broker: Broker) -> None:
    """That is what the ledger is for."""
    worker = await stage.worker()
    await stage.running("r1", worker)
    await broker.call("DEL", broker.keys.jobs("w0"), broker.keys.job("r1"), broker.keys.load("w0", worker.incarnation))
    found = await stage.jobs.ledger()
    assert (found, found.holds) == (Ledger(1, 0, 0, 0, 0, 0, 0), False)


async def test_a_ledger_of_another_type_stops_nothing(stage: Stage, broker: Broker) -> None:
    await broker.call("SET", broker.keys.ledger, "x")
    worker = await stage.worker()
    await stage.running("r1", worker)
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    assert await stage.load(worker) == (0, 0)
    await broker.call("DEL", broker.keys.ledger)
    # Nor does a field that is no number.
    await broker.call("HSET", broker.keys.ledger, "accepted", "many")
    await stage.submit("r2", worker)
    assert (await stage.jobs.ledger()).accepted == 0
