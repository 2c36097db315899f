"""What a dispatch makes of answers: of a worker, of the broker, and of the time that it all takes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from gateway.dispatch import Dispatch, Order
from gateway.errors import DeadlinePassed, Overloaded
from gateway.models import Models, Served
from kvstore.errors import BrokerError, BrokerFull, BrokerUnreachable, QueueFull, WorkerGone
from kvstore.jobs import Submitted
from kvstore.prefix_index import Seen
from kvstore.registry import Load, WorkerInfo
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class World:
    """A fleet, its index, and a broker that answers submissions with what it is told to."""

    def __init__(self, *workers: WorkerInfo) -> None:
        self.workers = workers
        self.loads: dict[str, Load] = {}
        self.answers: dict[str, Exception] = {}
        self.looked = 0
        self.submitted: list[dict[str, Any]] = []

    async def match(self, workers: Sequence[WorkerInfo], _: Mapping[str, object]) -> dict[str, Seen]:
        self.looked += 1
        return {each.id: Seen(0, self.loads.get(each.id, Load())) for each in workers}

    async def submit(self, _: job_pb2.Job, **said: Any) -> Submitted:
        self.submitted.append(said)
        if said["worker"] in self.answers:
            raise self.answers[said["worker"]]
        return Submitted.ACCEPTED

    async def send(self, order: Order) -> None:
        """To this fleet. Nothing of it may stay booked."""
        world: Any = self
        dispatch = Dispatch(world, world, world, FixedModels(self), gateway="g", max_queue=1, rng=random.Random(0))
        try:
            await dispatch.submit(order, Served("m", world, self.workers))
        finally:
            assert len(dispatch._pending) == 0


class FixedModels(Models):
    """The fleet stays as it is, whatever its workers answer."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def workers(self, served: Served) -> tuple[WorkerInfo, ...]:
        return self._world.workers


def worker(name: str, state: str = "ready") -> WorkerInfo:
    return WorkerInfo(name, f"{name}-1", "m", "f", state=state, prefill_tok_s=1000.0)


def order(remaining_s: Callable[[], float | None] = lambda: None) -> Order:
    stopping = inference_pb2.Stopping(max_tokens=9)
    return Order(job_pb2.Job(request_id="r", prompt_token_ids=[1], stopping=stopping), b"", remaining_s, "caller")


async def test_who_meets_full_queues_is_told_to_wait_for_those_who_take_jobs() -> None:
    """Not for who has gone or is about to: their work is done first."""
    world = World(worker("full"), worker("fuller"), worker("gone"), worker("draining", "draining"))
    world.loads = {"full": Load(0, 0, 5000, 0), "fuller": Load(0, 0, 9000, 0)}
    world.answers = {
        "full": QueueFull("full", 1, 1),
        "fuller": QueueFull("fuller", 1, 1),
        "gone": WorkerGone("gone", "gone-1", "it left"),
    }
    with pytest.raises(Overloaded) as refused:
        await world.send(order())
    assert [said["worker"] for said in world.submitted] == ["gone", "full", "fuller"]
    assert refused.value.retry_after_ms == 5000


async def test_the_time_left_is_taken_after_the_look() -> None:
    world = World(worker("w0"))
    await world.send(order(lambda: 10.0 - world.looked))
    assert [(said["deadline_ms"], said["caller"]) for said in world.submitted] == [(9000, "caller")]


async def test_a_deadline_that_passes_during_the_look_sends_nothing() -> None:
    world = World(worker("w0"))
    late = order(lambda: 1.0 - world.looked)
    with pytest.raises(DeadlinePassed):
        await world.send(late)
    assert (world.submitted, late.offered) == ([], False)


@pytest.mark.parametrize(("trouble", "offered"), [(BrokerFull("full"), False), (BrokerUnreachable("lost"), True)])
async def test_whether_a_worker_may_have_the_job_is_known(trouble: BrokerError, offered: bool) -> None:
    world, sent = World(worker("w0")), order()
    world.answers = {"w0": trouble}
    with pytest.raises(type(trouble)):
        await world.send(sent)
    assert sent.offered is offered
