"""What a dispatch makes of answers: of a worker, of the broker, and of the time that it all takes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from gateway.breaker import FAILURES, OPEN_S, Breaker
from gateway.dispatch import NO_LIMIT, Dispatch, Order, Sent
from gateway.errors import DeadlinePassed, NoWorker, Overloaded
from gateway.models import Models, Served
from gateway.placing import Placing
from kvstore.errors import BrokerError, BrokerFull, BrokerUnreachable, QueueFull, WorkerGone
from kvstore.jobs import Attached, Submitted
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
        self.found: Attached | None = None
        """The job is there already."""
        world: Any = self
        self.now = 100.0
        self.placing = Placing(world, world, max_queue=1, rng=random.Random(0), breaker=Breaker(lambda: self.now))
        self.dispatch = Dispatch(world, FixedModels(self), self.placing, gateway="g", max_queue=1)

    async def match(self, workers: Sequence[WorkerInfo], _: Mapping[str, object]) -> dict[str, Seen]:
        self.looked += 1
        return {each.id: Seen(0, self.loads.get(each.id, Load())) for each in workers}

    async def submit(self, _: job_pb2.Job, **said: Any) -> Submitted:
        self.submitted.append(said)
        if said["worker"] in self.answers:
            raise self.answers[said["worker"]]
        return self.found.submitted if self.found is not None else Submitted.ACCEPTED

    async def attach(self, _: str, **said: Any) -> Attached | None:
        assert (said["digest"], said["gateway"], said["caller"]) == (b"", "g", "caller")
        return self.found

    async def send(self, order: Order) -> Sent:
        """To this fleet. Nothing of it may stay booked."""
        world: Any = self
        try:
            return await self.dispatch.submit(order, Served("m", world, self.workers))
        finally:
            assert len(self.placing.pending) == 0


class FixedModels(Models):
    """The fleet stays as it is, whatever its workers answer."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def workers(self, served: Served) -> tuple[WorkerInfo, ...]:
        return self._world.workers


def worker(name: str, state: str = "ready", fingerprint: str = "f") -> WorkerInfo:
    return WorkerInfo(name, f"{name}-1", "m", fingerprint, state=state, prefill_tok_s=1000.0)


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


async def test_a_worker_whose_jobs_fail_gets_no_more_until_one_on_trial_succeeds() -> None:
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(0, 0, 9000, 0)}  # by cost, all would go to w0
    for _ in range(FAILURES):
        world.dispatch.failed("w0-1")
    assert (await world.send(order())).worker == "w1"
    world.now += OPEN_S
    trial = await world.send(order())
    assert (trial.worker, trial.trial) == ("w0", 1)
    assert (await world.send(order())).worker == "w1"
    world.dispatch.over(trial)
    second = await world.send(order())
    assert second.worker == "w0"
    world.dispatch.succeeded("m", 5, "w0-1")
    world.dispatch.over(second)
    assert [(each.worker, each.trial) for each in [await world.send(order()) for _ in range(2)]] == [("w0", 0)] * 2


async def test_a_trial_that_was_not_taken_is_none() -> None:
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(0, 0, 9000, 0)}
    for _ in range(FAILURES):
        world.dispatch.failed("w0-1")
    world.now += OPEN_S
    world.answers = {"w0": QueueFull("w0", 1, 1)}
    assert (await world.send(order())).worker == "w1"
    world.answers = {}
    assert (await world.send(order())).trial


async def test_workers_that_are_gone_have_not_failed() -> None:
    """Their leases tell: those that are back, after the broker has lost all, get jobs at once."""
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(0, 0, 9000, 0)}
    world.answers = {"w0": WorkerGone("w0", "w0-1", "its lease has lapsed")}
    for _ in range(FAILURES):
        assert (await world.send(order())).worker == "w1"
    assert [said["worker"] for said in world.submitted] == ["w0", "w1"] * FAILURES
    world.answers = {}
    assert (await world.send(order())).worker == "w0"


async def test_the_first_token_of_a_job_on_trial_brings_others() -> None:
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w1": Load(0, 0, 9000, 0)}
    for _ in range(FAILURES):
        world.dispatch.failed("w0-1")
    world.now += OPEN_S
    trial = await world.send(order())
    assert (await world.send(order())).worker == "w1"
    world.dispatch.began(trial)
    assert [(each.worker, each.trial) for each in [await world.send(order()) for _ in range(2)]] == [("w0", 0)] * 2


@pytest.mark.parametrize(("states", "chosen"), [(("ready", "ready"), "w1"), (("ready", "draining"), "w0")])
async def test_a_job_that_is_submitted_again_goes_to_the_kind_that_began_it(
    states: tuple[str, str], chosen: str
) -> None:
    """Which gives the same bits. If none of that kind takes jobs, any other one does."""
    world = World(worker("w0", states[0]), worker("w1", states[1], "g"))
    world.loads = {"w1": Load(0, 0, 9000, 0)}
    again = order()
    again.fingerprint = "g"
    sent = await world.send(again)
    assert (sent.worker, sent.fingerprint) == (chosen, "g" if chosen == "w1" else "f")
    assert again.fingerprint == "g"


@pytest.mark.parametrize("other", [("draining", "g"), ("ready", "h")])
async def test_a_job_that_needs_the_kind_that_began_it_waits_for_that(other: tuple[str, str]) -> None:
    world = World(worker("w0"), worker("w1", *other))
    again = order()
    again.fingerprint, again.same_kind = "g", True
    with pytest.raises(NoWorker):
        await world.send(again)
    assert (world.submitted, world.looked, again.fingerprint, again.offered) == ([], 0, "g", False)
    again.same_kind = False
    assert (await world.send(again)).worker in ("w0", "w1")
    unknown = order()
    unknown.same_kind = True
    assert (await world.send(unknown)).worker in ("w0", "w1")


@pytest.mark.parametrize(("accepted", "limit"), [(False, 1), (True, NO_LIMIT)])
async def test_what_was_accepted_once_is_not_refused_by_full_queues(accepted: bool, limit: int) -> None:
    """By the charges that the gateway reads both are full; the script is told how much is too much."""
    world = World(worker("w0"), worker("w1"))
    world.loads = {"w0": Load(9, 0, 0, 0), "w1": Load(9, 0, 5000, 0)}
    again = order()
    again.accepted = accepted
    assert (await world.send(again)).worker == "w0"
    assert [said["max_queue"] for said in world.submitted] == [limit]


async def test_who_meets_the_job_of_another_gateway_knows_what_runs_it() -> None:
    """It came between the look for it and the submission. Should it be lost, its kind is to bring it back."""
    world = World(worker("w0"))
    world.found = Attached(Submitted.ATTACHED, "w9", 7, "g")
    assert await world.send(order()) == Sent(Submitted.ATTACHED, "w9", 7, fingerprint="g")
