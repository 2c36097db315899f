"""Jobs of callers who have gone, and of such as were told to come back."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway import ending, pauses
from gateway.ending import Endings, Left
from gateway.errors import JobLost, NoWorker
from kvstore.errors import BrokerUnreachable


class World:
    """A broker that is away for some questions, and a gateway where somebody may wait for the job."""

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.did: list[str] = []
        self.request_id, self.callers = "r", {"c"}
        self.waits = False

    def bequeath(self, _: Any) -> bool:
        return self.waits

    async def get(self, _: str) -> None:
        self._reach("get")

    async def cancel(self, _: str, *, caller: str) -> None:
        self._reach(f"cancel {caller}")

    async def finish(self, _: str, **said: Any) -> None:
        self._reach(f"finish {said['expect_caller']}: {said['error']}")

    def _reach(self, what: str) -> None:
        if self.away:
            self.away -= 1
            raise BrokerUnreachable("away")
        self.did.append(what)

    async def end(
        self, *, submission: Any = "sent", asked: bool = True, late: bool = False, returning: bool = False
    ) -> list[str]:
        """What was done."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(submission, Exception):
            done.set_exception(submission)
        else:
            done.set_result(submission)
        world: Any = self
        submitting: Any = done
        await Endings(world, world).end(Left(world, submitting, lambda: asked, late=late, returning=returning))
        return self.did


@pytest.mark.parametrize(("late", "how"), [(False, "cancel c"), (True, "finish c: the client's deadline passed")])
async def test_a_job_ends_in_the_name_of_its_caller(late: bool, how: str) -> None:
    assert await World().end(late=late) == [how]


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("error", [BrokerUnreachable("lost"), JobLost("can't be submitted again")])
async def test_what_may_have_been_accepted_is_ended(error: Exception, asked: bool) -> None:
    assert await World().end(submission=error, asked=asked) == (["cancel c"] if asked else [])


@pytest.mark.parametrize("submission", [None, NoWorker("none")])
async def test_what_was_not_accepted_needs_no_end(submission: Any) -> None:
    assert await World().end(submission=submission) == []


async def test_the_time_to_come_back_begins_when_the_broker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that nobody can come back: their job must not be ended in the very moment when they could."""
    world = World(away=3)
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        world.did.append(f"sleep {seconds}")
        await real(0)

    monkeypatch.setattr("asyncio.sleep", sleep)
    monkeypatch.setattr("random.uniform", max)
    did = await world.end(returning=True)
    assert did == ["sleep 0.1", "sleep 0.2", "sleep 0.4", "get", f"sleep {ending.RETURN_S}", "cancel c"]


async def test_who_has_come_back_has_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def sleep(_: float) -> None:
        world.waits = True

    monkeypatch.setattr("asyncio.sleep", sleep)
    assert await world.end(returning=True) == ["get"]


async def test_it_is_tried_for_as_long_as_it_takes_and_not_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an outage of minutes, too, nothing may be left that runs for nobody."""
    slept: list[list[float]] = [[], []]
    worlds = [World(away=300) for _ in slept]
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        slept[int(task.get_name())].append(seconds)
        await real(0)

    monkeypatch.setattr("asyncio.sleep", sleep)
    ends = [asyncio.create_task(world.end(), name=f"{index}") for index, world in enumerate(worlds)]
    assert await asyncio.gather(*ends) == [["cancel c"]] * 2
    assert all(sum(each) > 180 for each in slept)
    assert slept[0] != slept[1]


async def test_what_waits_to_be_ended_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "MAX_WAITING", 1)
    monkeypatch.setattr(pauses, "PAUSE_S", (0.001, 0.001))
    world: Any = World(away=3)
    endings = Endings(world, world)
    sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    sent.set_result("sent")
    left = Left(world, cast("Any", sent), lambda: True, late=False, returning=False)
    await asyncio.gather(endings.end(left), endings.end(left))
    assert world.did == ["cancel c"]
    assert "job r runs on for nobody: 1 others wait to be ended: away" in caplog.text
    world.away = 1
    await endings.end(left)
    assert world.did == ["cancel c"] * 2
