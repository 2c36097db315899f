"""Jobs of callers who have gone, and of such as were told to come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway import ending
from gateway.ending import Left, end_job
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
        await end_job(world, world, Left(world, submitting, lambda: asked, late=late, returning=returning))
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
    did = await world.end(returning=True)
    assert did == ["sleep 0.1", "sleep 0.2", "sleep 0.4", "get", f"sleep {ending.RETURN_S}", "cancel c"]


async def test_who_has_come_back_has_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def sleep(_: float) -> None:
        world.waits = True

    monkeypatch.setattr("asyncio.sleep", sleep)
    assert await world.end(returning=True) == ["get"]
