"""Workers that go: told to, with a goodbye, or broken, without one."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvstore import outage
from kvstore.errors import BrokerAuth
from kvstore.jobs import Finished, Rehomed, Target
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from tests.integration.worker.one_worker import GATEWAY, LONG, Fleet, joined, running_worker
from tests.support.waiting import until
from worker import stepper
from worker.errors import StoppedError
from worker.scheduling.block import IntegrityError

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvstore.client import Broker
    from worker.step import StepOutput


async def said_goodbye(fleet: Fleet) -> bool:
    info = fleet.worker.info
    return bool(await fleet.broker.call("GET", fleet.broker.keys.left(info.id, info.incarnation)) == b"")


def slow(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes its time, so that a drain takes some."""
    step = fleet.worker.engine.step

    def slow_step() -> StepOutput:
        time.sleep(0.005)
        return step()

    monkeypatch.setattr(fleet.worker.engine, "step", slow_step)


async def has_claimed(fleet: Fleet, request_id: str) -> bool:
    return request_id in fleet.loop._journal.running


async def is_in_a_step(fleet: Fleet) -> bool:
    return fleet.loop._stepper.step_began is not None


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
        assert (orphan.request_id, orphan.why, orphan.deaths) == ("poison", "broke", 1)


async def test_who_breaks_for_the_brokers_sake_has_not_died_of_what_it_ran(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may not subscribe any more."""
    async with running_worker(broker, model_dir, tmp_path, ends_with=BrokerAuth) as fleet:
        monkeypatch.setattr(fleet.worker.engine, "add", lambda *_: None)  # it never gets to a token
        await fleet.submit("innocent", [5, 6, 7], LONG)
        await until(lambda: has_claimed(fleet, "innocent"), within_s=10)
        others = (broker.keys.channel(GATEWAY), broker.keys.help(fleet.worker.info.fingerprint))
        try:
            await broker.call("ACL", "SETUSER", "default", "resetchannels", *(f"&{name}" for name in others))
            await until(lambda: has_gone(fleet), within_s=10)
        finally:
            await broker.call("ACL", "SETUSER", "default", "allchannels")
        (orphan,) = await fleet.jobs.orphans()
        assert (orphan.request_id, orphan.why, orphan.deaths) == ("innocent", "left", 0)


async def test_who_may_not_write_what_jobs_say_leaves_them_to_others_after_a_while(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may use all keys but logs."""
    monkeypatch.setattr(outage, "REFUSED_S", 0.3)
    all_but_logs = (f"~{broker.keys.prefix}{rest}" for rest in ("[a-km-z]*", "l[a-np-z]*", "lo[a-fh-z]*"))
    async with running_worker(broker, model_dir, tmp_path, ends_with=BrokerAuth) as fleet:
        slow(fleet, monkeypatch)
        await fleet.submit("r1", [5, 6, 7], LONG)
        await fleet.tokens("r1", 1)
        try:
            await broker.call("ACL", "SETUSER", "default", "resetkeys", *all_but_logs)
            await until(lambda: has_gone(fleet), within_s=10)
        finally:
            await broker.call("ACL", "SETUSER", "default", "allkeys")
        (orphan,) = await fleet.jobs.orphans()
        assert (orphan.request_id, orphan.why, orphan.deaths) == ("r1", "left", 0)


async def test_what_a_worker_leaves_behind_it_has_not_died_of(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(broker, model_dir, tmp_path, grace=0.0) as fleet:
        monkeypatch.setattr(fleet.worker.engine, "add", lambda *_: None)  # it never gets to a token
        await fleet.submit("waits", [5, 6, 7], LONG)
        await until(lambda: has_claimed(fleet, "waits"), within_s=10)
        fleet.loop.drain()
        await until(lambda: has_gone(fleet), within_s=10)
        assert await said_goodbye(fleet)
        (orphan,) = await fleet.jobs.orphans()
        assert (orphan.request_id, orphan.why, orphan.deaths) == ("waits", "left", 0)


async def test_what_a_draining_worker_has_not_begun_is_taken_from_it(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes when it has ended what it has begun, long before its grace time is over."""
    other = WorkerInfo(id="w1", incarnation=new_incarnation(), model="tiny", fingerprint="f")
    await Registry(broker).register(other)
    async with running_worker(broker, model_dir, tmp_path, max_running=1, grace=60.0) as fleet:
        slow(fleet, monkeypatch)
        await fleet.submit("begun", [5, 6, 7], LONG)
        await fleet.tokens("begun", 1)
        await fleet.submit("waits", [5, 6, 8], LONG)
        await until(lambda: has_claimed(fleet, "waits"), within_s=10)
        fleet.loop.drain()
        await until(lambda: said_goodbye(fleet), within_s=10)
        (orphan,) = await fleet.jobs.orphans()
        assert (orphan.request_id, orphan.why, orphan.deaths, orphan.kept) == ("waits", "is draining", 0, True)
        assert await fleet.jobs.rehome(orphan, Target("w1", other.incarnation, 3, 0)) is Rehomed.MOVED

        async def is_dropped() -> bool:
            return [*fleet.loop._journal.running] == ["begun"]

        await until(is_dropped, within_s=10)
        assert len(joined(await fleet.ended("begun"))) == LONG
        await until(lambda: has_gone(fleet), within_s=10)
        assert await fleet.log("waits") == []
        assert not await said_goodbye(fleet)  # nothing was left behind


async def test_who_is_told_twice_to_go_leaves_what_runs_to_others(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(broker, model_dir, tmp_path, grace=60.0) as fleet:
        slow(fleet, monkeypatch)
        await fleet.submit("long", [5, 6, 7], LONG)
        await fleet.tokens("long", 1)
        fleet.loop.drain()
        fleet.loop.drain(at_once=True)
        await until(lambda: has_gone(fleet), within_s=5)
        (orphan,) = await fleet.jobs.orphans()
        assert (orphan.request_id, orphan.why, orphan.deaths) == ("long", "left", 0)
        assert orphan.next > (0,)


async def test_a_step_that_hangs_does_not_keep_a_worker(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job is left to others; the process must not wait for the thread, so it is told not to. It was told to leave:
    that is no failure."""
    monkeypatch.setattr(stepper, "END_S", 0.2)
    goes_on = threading.Event()
    try:
        async with running_worker(broker, model_dir, tmp_path, grace=0.0, ends_with=StoppedError) as fleet:
            step = fleet.worker.engine.step
            monkeypatch.setattr(fleet.worker.engine, "step", lambda: (goes_on.wait(), step())[1])
            await fleet.submit("hangs", [5, 6, 7], LONG)
            await until(lambda: is_in_a_step(fleet), within_s=10)
            fleet.loop.drain()
            await until(lambda: has_gone(fleet), within_s=5)
            (orphan,) = await fleet.jobs.orphans()
            assert (orphan.request_id, orphan.why, orphan.deaths) == ("hangs", "left", 0)
    finally:
        goes_on.set()


async def test_a_goodbye_is_said_as_soon_as_a_drain_begins(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the worker be killed before its grace time is over."""
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        slow(fleet, monkeypatch)
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
