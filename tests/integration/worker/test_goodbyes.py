"""Workers that go: told to, with a goodbye, or broken, without one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.jobs import Finished
from kvstore.registry import Registry
from tests.integration.worker.one_worker import LONG, Fleet, running_worker
from tests.support.waiting import until
from worker.scheduling.block import IntegrityError

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvstore.client import Broker
    from worker.step import StepOutput


async def said_goodbye(fleet: Fleet) -> bool:
    info = fleet.worker.info
    return bool(await fleet.broker.call("EXISTS", fleet.broker.keys.left(info.id, info.incarnation)))


async def has_gone(fleet: Fleet) -> bool:
    return fleet.running.done()


async def test_a_worker_that_breaks_may_have_died_of_what_had_no_token(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs move at once all the same: its lease is given back."""

    def broken_step() -> StepOutput:
        raise IntegrityError("broken")

    async with running_worker(broker, model_dir, tmp_path, ends_with=IntegrityError) as fleet:
        monkeypatch.setattr(fleet.worker.engine, "step", broken_step)
        await fleet.submit("poison", [5, 6, 7], LONG)
        await until(lambda: has_gone(fleet), within_s=10)
        assert await Registry(broker).workers() == []
        assert not await said_goodbye(fleet)
        (orphan,) = await fleet.jobs.orphans()
        assert (orphan.job.request_id, orphan.why, orphan.deaths) == ("poison", "left", 1)


async def test_what_a_worker_leaves_behind_it_has_not_died_of(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(broker, model_dir, tmp_path, grace=0.0) as fleet:
        monkeypatch.setattr(fleet.worker.engine, "add", lambda *_: None)  # it never gets to a token
        await fleet.submit("waits", [5, 6, 7], LONG)

        async def claimed() -> bool:
            return "waits" in fleet.loop._journal.running

        await until(claimed, within_s=10)
        fleet.loop.drain()
        await until(lambda: has_gone(fleet), within_s=10)
        assert await said_goodbye(fleet)
        (orphan,) = await fleet.jobs.orphans()
        assert (orphan.job.request_id, orphan.why, orphan.deaths) == ("waits", "left", 0)


async def test_a_goodbye_is_said_as_soon_as_a_drain_begins(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the worker be killed before its grace time is over."""
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        step = fleet.worker.engine.step

        def slow_step() -> StepOutput:
            time.sleep(0.02)  # a model that takes its time, so that the drain takes some
            return step()

        monkeypatch.setattr(fleet.worker.engine, "step", slow_step)
        await fleet.submit("long", [5, 6, 7], LONG)
        await fleet.tokens("long", 1)
        assert not await said_goodbye(fleet)
        fleet.loop.drain()
        await until(lambda: said_goodbye(fleet), within_s=10)
        assert not fleet.running.done()
        await fleet.jobs.cancel("long")
        await until(lambda: has_gone(fleet), within_s=10)
        assert not await said_goodbye(fleet)  # nothing was left behind
    assert await fleet.jobs.cancel("long") is Finished.ALREADY
