"""Jobs of callers who have gone, and of such as were told to come back."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest

from gateway import ending, pauses
from gateway.ending import Endings, Left
from gateway.errors import JobLost, NoWorker
from gateway.tasks import Tasks
from kvstore.errors import BrokerUnreachable
from tests.support.waiting import until


@dataclass(eq=False)
class Call:
    """What an ending knows of a call."""

    request_id: str
    callers: set[str]


class World:
    """A broker that is away for some questions, and a gateway where somebody may wait for the job."""

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.did: list[str] = []
        self.waits = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = self.most_asked = 0
        self.tasks = Tasks()
        world: Any = self
        self.endings = Endings(world, world, self.tasks)

    def bequeath(self, *_: Any) -> bool:
        return self.waits

    async def get(self, _: str) -> None:
        await self._reach("get")

    async def cancel(self, _: str, *, caller: str) -> None:
        await self._reach(f"cancel {caller}")

    async def finish(self, _: str, **said: Any) -> None:
        await self._reach(f"finish {said['expect_caller']}: {said['error']}")

    async def _reach(self, what: str) -> None:
        self.asked += 1
        self.most_asked = max(self.most_asked, self.asked)
        await asyncio.wait([asyncio.ensure_future(self.answers.wait())])
        self.asked -= 1
        if self.away:
            self.away -= 1
            raise BrokerUnreachable("away")
        self.did.append(what)

    async def is_asked(self) -> bool:
        return self.asked > 0

    async def end(self, **how: Any) -> list[str]:
        """What was done, once there is nothing more to do."""
        await self.endings.end(left(**how))
        await self.over()
        return self.did

    async def over(self) -> None:
        while len(self.tasks):
            await asyncio.wait(set(self.tasks._tasks))


def left(
    request_id: str = "r",
    caller: str = "c",
    *,
    submission: Any = "sent",
    asked: bool = True,
    late: bool = False,
    returning: bool = False,
) -> Left:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    if isinstance(submission, Exception):
        done.set_exception(submission)
    else:
        done.set_result(submission)
    call: Any = Call(request_id, {caller})
    submitting: Any = done
    return Left(call, submitting, lambda: asked, late=late, returning=returning)


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
    slept: list[list[float]] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept[-1].append(seconds)
        await real(0)

    monkeypatch.setattr("asyncio.sleep", sleep)
    for _ in range(2):
        slept.append([])
        assert await World(away=300).end() == ["cancel c"]
    assert all(sum(each) > 180 for each in slept)
    assert slept[0] != slept[1]


async def test_what_waits_to_be_ended_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "MAX_WAITING", 1)
    monkeypatch.setattr(pauses, "PAUSE_S", (0.001, 0.001))
    world = World(away=3)
    await asyncio.gather(world.endings.end(left("r")), world.endings.end(left("s")))
    await world.over()
    assert world.did == ["cancel c"]
    assert "job s runs on for nobody: 1 others wait to be ended: away" in caplog.text
    world.away = 1
    assert await world.end() == ["cancel c"] * 2


async def test_one_job_waits_once_whoever_has_left_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that tries again and again takes no other one's place."""
    monkeypatch.setattr(ending, "MAX_WAITING", 1)
    monkeypatch.setattr(pauses, "PAUSE_S", (0.001, 0.001))
    world = World(away=4)
    calls = left(caller="a"), left(caller="b", late=True), left(caller="c")
    await asyncio.gather(*map(world.endings.end, calls))
    await world.over()
    assert world.did == ["cancel a", "finish b: the client's deadline passed", "cancel c"]
    assert "runs on for nobody" not in caplog.text


async def test_whoever_may_return_to_a_job_that_waits_gets_the_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "RETURN_S", 0.0)
    world = World(away=2)
    await asyncio.gather(*map(world.endings.end, (left(caller="a"), left(caller="b", returning=True))))
    await world.over()
    assert world.did == ["get", "cancel a", "cancel b"]


async def test_of_a_call_that_is_over_only_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes may hang on it: its request and what was not read of its output."""
    monkeypatch.setattr(pauses, "PAUSE_S", (0.001, 0.001))
    world, gone = World(away=1), left()
    call = weakref.ref(gone.stream)
    world.answers.clear()
    ends = asyncio.create_task(world.endings.end(gone))
    del gone
    await until(world.is_asked, within_s=5)
    gc.collect()
    assert call() is None
    world.answers.set()
    await ends
    await world.over()
    assert world.did == ["cancel c"]


async def test_what_waited_is_ended_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are to be renewed first when the broker is back."""
    monkeypatch.setattr(pauses, "PAUSE_S", (0.001, 0.001))
    world = World(away=50)
    await asyncio.gather(*(world.endings.end(left(f"r{number}")) for number in range(50)))
    world.most_asked = 0
    await world.over()
    assert (world.did, world.most_asked) == (["cancel c"] * 50, 1)
