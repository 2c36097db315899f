"""Routing around workers that change between the look at them and the submission."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from gateway.dispatch import Dispatch, Order
from gateway.errors import NoWorker, Overloaded
from gateway.models import Models
from gateway.tasks import Tasks
from gateway.tokenize import TokenizerPool
from kvstore.jobs import Jobs, Submitted
from kvstore.registry import Load, Registry
from octavo.v1 import inference_pb2, job_pb2
from tests.integration.gateway.scripted import ScriptedWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo


class RegistryWithAnAccident(Registry):
    """Right after the loads are read, the workers named in `doomed` leave."""

    doomed: tuple[ScriptedWorker, ...] = ()

    async def loads(self, workers: Sequence[WorkerInfo]) -> dict[str, Load]:
        loads = await super().loads(workers)
        doomed, self.doomed = self.doomed, ()
        for worker in doomed:
            await worker.stop()
        return loads


def order(request_id: str) -> Order:
    job = job_pb2.Job(request_id=request_id, prompt_token_ids=[1], stopping=inference_pb2.Stopping(max_tokens=9), n=1)
    return Order(job, b"digest", lambda: None)


@pytest.mark.parametrize("survivors", [1, 0])
async def test_a_worker_that_has_just_gone_is_routed_around(broker: Broker, survivors: int) -> None:
    workers = [ScriptedWorker(broker, f"w{index}") for index in range(3)]
    for worker in workers:
        await worker.start()
    registry, pool, tasks = RegistryWithAnAccident(broker), TokenizerPool(1), Tasks()
    models = Models(registry, pool, tasks)
    dispatch = Dispatch(Jobs(broker), registry, models, gateway="g", max_queue=1, rng=random.Random(0))
    served = await models.find("tiny")
    registry.doomed = tuple(workers[survivors:])
    if survivors:
        sent = await dispatch.submit(order("r1"), served)
        assert (sent.submitted, sent.worker) == (Submitted.ACCEPTED, "w0")
        assert [queue.undelivered for queue in await workers[0].jobs.queues() if queue.worker == "w0"] == [1]
        await workers[0].stop()
    else:
        with pytest.raises(NoWorker, match="no live worker of model 'tiny' takes jobs"):
            await dispatch.submit(order("r1"), served)
    await pool.close()


async def test_a_full_worker_is_routed_around(broker: Broker) -> None:
    workers = [ScriptedWorker(broker, f"w{index}") for index in range(2)]
    for worker in workers:
        await worker.start()
    registry, pool, tasks = Registry(broker), TokenizerPool(1), Tasks()
    models = Models(registry, pool, tasks)
    dispatch = Dispatch(Jobs(broker), registry, models, gateway="g", max_queue=1, rng=random.Random(0))
    served = await models.find("")
    assert {(await dispatch.submit(order(request_id), served)).worker for request_id in ("r1", "r2")} == {"w0", "w1"}
    for worker in workers:
        await worker.stop()
    await pool.close()


class CountingRegistry(Registry):
    """Counts the looks at the fleet, and at its loads."""

    looks = 0
    loads_read = 0

    async def loads(self, workers: Sequence[WorkerInfo]) -> dict[str, Load]:
        self.loads_read += 1
        return await super().loads(workers)

    async def workers(self) -> list[WorkerInfo]:
        self.looks += 1
        return await super().workers()


async def test_loads_are_read_only_where_there_is_a_choice(broker: Broker) -> None:
    worker, other = ScriptedWorker(broker), ScriptedWorker(broker, "w1")
    await worker.start()
    registry, pool, tasks = CountingRegistry(broker), TokenizerPool(1), Tasks()
    models = Models(registry, pool, tasks)
    dispatch = Dispatch(Jobs(broker), registry, models, gateway="g", max_queue=1, rng=random.Random(0))
    assert (await dispatch.submit(order("r1"), await models.find("tiny"))).worker == "w0"
    assert registry.loads_read == 0
    await other.start()
    served = await models.find("tiny", now=True)
    assert [each.id for each in served.workers] == ["w0", "w1"]
    assert (await dispatch.submit(order("r2"), served)).worker == "w1"
    assert registry.loads_read == 1
    # The first that is tried is full, then there is only one left.
    with pytest.raises(Overloaded):
        await dispatch.submit(order("r3"), served)
    assert registry.loads_read == 2
    for each in (worker, other):
        await each.stop()
    await pool.close()


async def test_one_look_at_the_fleet_serves_many_requests(broker: Broker) -> None:
    worker = ScriptedWorker(broker)
    await worker.start()
    registry, pool, tasks = CountingRegistry(broker), TokenizerPool(1), Tasks()
    models = Models(registry, pool, tasks)
    await models.refresh()
    for _ in range(10):
        await models.find("tiny")
    assert registry.looks == 1
    assert len((await models.find("tiny", now=True)).workers) == 1
    assert registry.looks == 2
    # A name that is not known is looked for; so nobody is refused because of an old look.
    newcomer = ScriptedWorker(broker, "w1", model="new")
    await newcomer.start()
    assert [each.id for each in (await models.find("new")).workers] == ["w1"]
    assert registry.looks == 3
    await worker.stop()
    await newcomer.stop()
    with pytest.raises(NoWorker, match="no live worker"):
        await models.find("tiny", now=True)
    with pytest.raises(NoWorker, match="no live worker"):
        await models.find("tiny")
    assert registry.looks == 5
    await pool.close()
