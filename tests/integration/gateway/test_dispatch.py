"""Routing around workers that change between the look at them and the submission."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from gateway.dispatch import Dispatch, Order
from gateway.errors import NoWorker
from gateway.models import Models
from gateway.placing import Placing
from gateway.prefixes import Index
from gateway.tasks import Tasks
from gateway.tokenize import TokenizerPool
from kvstore.jobs import Jobs, Submitted
from kvstore.prefix_index import PrefixIndex
from kvstore.registry import Registry
from octavo.v1 import fleet_pb2, inference_pb2, job_pb2
from tests.integration.gateway.scripted import ScriptedWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from kvstore.block_hash import BlockHash
    from kvstore.client import Broker
    from kvstore.prefix_index import Seen
    from kvstore.registry import WorkerInfo


class IndexWithAnAccident(PrefixIndex):
    """Right after it is read, the workers named in `doomed` leave."""

    doomed: tuple[ScriptedWorker, ...] = ()

    async def match(self, workers: Sequence[WorkerInfo], hashes: Mapping[str, Sequence[BlockHash]]) -> dict[str, Seen]:
        seen = await super().match(workers, hashes)
        doomed, self.doomed = self.doomed, ()
        for worker in doomed:
            await worker.stop()
        return seen


def order(request_id: str, prompt: Sequence[int] = (1,), **fields: Any) -> Order:
    stopping = inference_pb2.Stopping(max_tokens=9)
    return Order(
        job_pb2.Job(request_id=request_id, model="tiny", prompt_token_ids=prompt, stopping=stopping, n=1, **fields),
        b"digest",
        lambda: None,
    )


@dataclass
class Stage:
    """A dispatch on the test's broker, and what it asks."""

    broker: Broker
    dispatch: Dispatch
    models: Models


@asynccontextmanager
async def dispatching(
    broker: Broker,
    *workers: ScriptedWorker,
    registry: Registry | None = None,
    index: PrefixIndex | None = None,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """A dispatch for these workers, which are started, and stopped at the end if they are there still."""
    registry, pool, tasks = registry or Registry(broker), TokenizerPool(1), Tasks()
    models = Models(registry, pool, tasks)
    options = {"max_queue": 64, **settings}
    placing = Placing(registry, index or PrefixIndex(broker), rng=random.Random(0), **options)
    dispatch = Dispatch(Jobs(broker), models, placing, gateway="g", **options)
    for worker in workers:
        await worker.start()
    try:
        yield Stage(broker, dispatch, models)
    finally:
        for worker in workers:
            await worker.stop()
        await pool.close()


@pytest.mark.parametrize("survivors", [1, 0])
async def test_a_worker_that_has_just_gone_is_routed_around(broker: Broker, survivors: int) -> None:
    workers = [ScriptedWorker(broker, f"w{index}") for index in range(3)]
    index = IndexWithAnAccident(broker)
    async with dispatching(broker, *workers, index=index) as stage:
        served = await stage.models.find("tiny")
        index.doomed = tuple(workers[survivors:])
        if survivors:
            sent = await stage.dispatch.submit(order("r1"), served)
            assert (sent.submitted, sent.worker) == (Submitted.ACCEPTED, "w0")
            assert [queue.undelivered for queue in await workers[0].jobs.queues() if queue.worker == "w0"] == [1]
        else:
            with pytest.raises(NoWorker, match="no live worker of model 'tiny' takes jobs"):
                await stage.dispatch.submit(order("r1"), served)


async def test_a_full_worker_is_routed_around(broker: Broker) -> None:
    workers = [ScriptedWorker(broker, f"w{index}") for index in range(2)]
    async with dispatching(broker, *workers, max_queue=1) as stage:
        served = await stage.models.find("")
        sent = [await stage.dispatch.submit(order(request_id), served) for request_id in ("r1", "r2")]
        assert {each.worker for each in sent} == {"w0", "w1"}


async def test_500_prompts_at_once_are_all_placed_by_what_workers_hold(broker: Broker) -> None:
    """Their crowd takes longer than the index may."""
    workers = [ScriptedWorker(broker, f"w{index}") for index in range(2)]
    async with dispatching(broker, *workers, max_queue=1000) as stage:
        served = await stage.models.find("")
        prompt = range(2, 2000)
        orders = [order(f"r{index}", [index + 2, *prompt]) for index in range(500)]
        sent = await asyncio.gather(*(stage.dispatch.submit(each, served) for each in orders))
        assert {each.submitted for each in sent} == {Submitted.ACCEPTED}
        found = await broker.call("XRANGE", broker.keys.routes, "-", "+")
        records = [fleet_pb2.RouteRecord.FromString(fields[b"d"]) for _, fields in found]
        assert Counter(each.index for each in records) == {Index.EXACT: 500}


class CountingRegistry(Registry):
    """Counts the looks at the fleet."""

    looks = 0

    async def workers(self) -> list[WorkerInfo]:
        self.looks += 1
        return await super().workers()


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
