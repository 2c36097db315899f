"""Jobs that the broker has lost: how often they are tried, with whom, and how often anybody looks at the fleet."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from redis.asyncio import Redis

from gateway import pauses as pauses_module
from gateway import resubmission as module
from gateway.dispatch import Order, Sent
from gateway.errors import Draining, JobLost, NoWorker, Overloaded
from gateway.pauses import pauses
from gateway.relay import Relay
from gateway.resubmission import Looks, Resubmission
from gateway.tasks import Tasks
from kvstore.errors import BrokerUnreachable
from kvstore.jobs import Submitted
from octavo.v1 import job_pb2
from tests.support.waiting import until

if TYPE_CHECKING:
    from gateway.models import Served

SENT = Sent(Submitted.ACCEPTED, "w0", fingerprint="g")


class World:
    """A broker that answers submissions as it is told to, the last answer for ever; a fleet; and a call."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.asked_for: list[tuple[bool, bool]] = []
        """Of each submission: whether full queues count, and whether only one kind will do."""
        self.looks: list[str] = []
        self.closed = self.left = False
        self.begun = True
        self.stream = self
        self.order = Order(job_pb2.Job(model="m"), b"", lambda: None)
        self.fingerprint = "f"
        """Of what its reader has."""
        self.tasks = Tasks()
        self.trouble: Exception | None = None

    def resubmission(self) -> Resubmission:
        world: Any = self
        return Resubmission(world, world, world, self.tasks)

    async def run(self) -> Sent:
        return await self.resubmission().submit(cast("Any", self))

    async def ordered(self) -> Order:
        return self.order

    def offered(self) -> bool:
        return True

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def find(self, name: str, *, now: bool) -> Served:
        assert now
        self.looks.append(name)
        served = f"served {name} {len(self.looks)}"
        await asyncio.sleep(0)
        if self.trouble is not None:
            raise self.trouble
        return cast("Served", served)

    async def submit(self, order: Order, _: Served) -> Sent:
        self.asked_for.append((order.accepted, order.same_kind))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer
        return SENT


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses_module, "PAUSE_S", (0.001, 0.01))


def test_pauses_grow_and_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", max)
    assert list(itertools.islice(pauses(), 7)) == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    monkeypatch.setattr("random.uniform", min)
    assert list(itertools.islice(pauses(), 3)) == [0.05, 0.1, 0.2]


@pytest.mark.usefixtures("hurried")
async def test_it_is_tried_until_it_works() -> None:
    world = World(NoWorker("none"), Overloaded("full"), BrokerUnreachable("lost"), None)
    assert await world.run() is SENT
    assert world.asked_for == [(True, True)] * 4


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.usefixtures("hurried")
async def test_only_a_while_and_only_with_output_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    clock = itertools.count(step=0.25)  # a quarter of a second passes whenever somebody looks
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    world = World(*[NoWorker("none")] * 20, None)
    world.begun = begun
    await world.run()
    kinds = [same_kind for _, same_kind in world.asked_for]
    assert len(kinds) == 21
    assert kinds == sorted(kinds, reverse=True)  # first all that insist, then all that do not
    assert (kinds[0], kinds[-1]) == (begun, False)


async def test_what_its_reader_has_stays_of_the_kind_that_gave_it() -> None:
    """Lost again before another kind had said anything, it waits for the first one, not for that."""
    world = World(None)
    await world.run()
    assert (world.order.fingerprint, world.fingerprint) == ("f", "f")
    world.begun = False
    await world.run()
    assert (world.order.fingerprint, world.fingerprint) == ("f", "g")
    await world.run()
    assert world.order.fingerprint == "g"


@pytest.mark.usefixtures("hurried")
async def test_it_ends_with_the_gateway_with_the_caller_and_with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(NoWorker("none"))
    world.closed = True
    with pytest.raises(Draining):
        await world.run()
    world.left = True
    with pytest.raises(NoWorker):
        await world.run()
    monkeypatch.setattr(module, "PATIENCE_S", -1.0)
    world.left = world.closed = False
    with pytest.raises(JobLost, match="the broker has lost the job, and it can't be submitted again: none"):
        await world.run()
    world.answers = [BrokerUnreachable("broker at secret-host:6379 cannot be reached")]
    with pytest.raises(JobLost) as caught:
        await world.run()
    lost = "the broker has lost the job, and it can't be submitted again"
    assert str(caught.value) == f"{lost}: the broker does not answer; try again"


async def test_a_gateway_that_stops_waits_for_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callers must hear of it before their connections are cut."""
    monkeypatch.setattr(pauses_module, "PAUSE_S", (60.0, 60.0))
    nobody: Any = SimpleNamespace(keys=SimpleNamespace(channel=str), blocking=Redis)
    world, relay = World(NoWorker("none")), Relay(nobody, nobody, "g")
    resubmission: Any = world.resubmission()
    resubmission._relay = relay
    submission = asyncio.create_task(resubmission.submit(world))
    await until(lambda: tried(world), within_s=3)
    await relay.close()
    with pytest.raises(Draining, match="the gateway is stopping"):
        await asyncio.wait_for(submission, 3)
    assert len(world.asked_for) == 2


async def tried(world: World) -> bool:
    return bool(world.asked_for)


async def test_all_who_wait_share_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 60.0)
    world: Any = World(None)
    looks = Looks(world, world.tasks)
    found = await asyncio.gather(*(looks.find(name) for name in ["m", "n"] * 50))
    assert found == ["served m 1", "served n 2"] * 50
    assert await looks.find("m") == "served m 1"
    assert world.looks == ["m", "n"]


async def test_a_look_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    world: Any = World(None)
    looks = Looks(world, world.tasks)
    assert [await looks.find("m") for _ in range(2)] == ["served m 1", "served m 2"]


async def test_a_look_that_fails_fails_for_all_who_share_it() -> None:
    world: Any = World(None)
    world.trouble = NoWorker("none")
    looks = Looks(world, world.tasks)
    found = await asyncio.gather(*(looks.find("m") for _ in range(3)), return_exceptions=True)
    assert found == [world.trouble] * 3
    assert world.looks == ["m"]


async def test_who_leaves_does_not_end_the_look_of_the_others() -> None:
    world: Any = World(None)
    looks = Looks(world, world.tasks)
    first, second = (asyncio.create_task(looks.find("m")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "served m 1"
