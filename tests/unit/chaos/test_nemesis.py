"""Faults on real processes, and on a broker and proxies that only write down what was done to them."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from bench.chaos.nemesis import LOSE_WITHIN_S, Nemesis, Struck
from bench.chaos.proxy import Proxy
from bench.chaos.schedule import BROKER, NATURES, WORKERS, Fault, Kind
from kvstore.errors import BrokerUnreachable
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class Server:
    """Notes what happens to it."""

    calls: list[str] = field(default_factory=list)
    running: bool = True

    async def start(self, *, empty: bool = False) -> None:
        self.running = True
        self.calls.append("start empty" if empty else "start")

    async def kill(self, *, lose_s: float = 0.0) -> None:
        self.running = False
        self.calls.append(f"kill {lose_s:g}")

    async def connect(self, namespace: str) -> Any:
        raise BrokerUnreachable(f"no server for {namespace}")


@dataclass
class Living:
    """Children of this process."""

    children: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    come_back: bool = True
    workers: tuple[str, ...] = ("w0", "w1")
    back: list[str] = field(default_factory=list)

    def pid(self, name: str) -> int | None:
        child = self.children.get(name)
        return child.pid if child is not None and child.returncode is None else None

    async def until_back(self, name: str, pid: int) -> None:
        old = self.children[name]
        assert (await old.wait(), old.pid) == (-signal.SIGTERM, pid)
        if not self.come_back:
            raise TimeoutError
        alive = [other for other in self.workers if other != name and self.pid(other) is not None]
        self.back.append(f"{name} while {' '.join(alive)} ran")
        await self.add(name)

    async def add(self, name: str) -> asyncio.subprocess.Process:
        """One that is ready for signals."""
        code = "import time; print(flush=True); time.sleep(600)"
        child = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        await child.stdout.readline()
        self.children[name] = child
        return child


@dataclass
class Stage:
    nemesis: Nemesis
    living: Living
    server: Server
    proxies: dict[str, Proxy]
    notes: list[str]

    async def strike(self, *faults: Fault) -> list[Struck]:
        async with asyncio.timeout(20):
            return await self.nemesis.run(faults)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    living, server, notes = Living(), Server(), list[str]()
    async with Proxy(1) as one, Proxy(1) as other:
        proxies = {"w0": one, "g0": other}
        nemesis = Nemesis(processes=living, server=server, proxies=proxies, namespace="n", seed=1, note=notes.append)
        yield Stage(nemesis, living, server, proxies, notes)
    for child in living.children.values():
        if child.returncode is None:
            child.kill()
        await child.communicate()


@pytest.mark.parametrize(
    ("kind", "status"), [(Kind.WORKER_KILL, -signal.SIGKILL), (Kind.GATEWAY_TERM, -signal.SIGTERM)]
)
async def test_processes_are_ended(stage: Stage, kind: Kind, status: int) -> None:
    child = await stage.living.add("w0")
    (struck,) = await stage.strike(Fault(0.0, kind, "w0"))
    assert await child.wait() == status
    assert (struck.done, struck.outcome) == (True, f"done: pid {child.pid}")
    assert stage.notes == [str(struck)]


async def test_workers_are_restarted_in_turn(stage: Stage) -> None:
    first, second = await stage.living.add("w0"), await stage.living.add("w1")
    (struck,) = await stage.strike(Fault(0.0, Kind.WORKERS_ROLL, WORKERS))
    assert struck.outcome == f"done: w0 (pid {first.pid}), then w1 (pid {second.pid})"
    assert stage.living.back == ["w0 while w1 ran", "w1 while w0 ran"]


async def test_a_worker_that_does_not_come_back_ends_the_turns(stage: Stage) -> None:
    stage.living.come_back = False
    first, second = await stage.living.add("w0"), await stage.living.add("w1")
    (struck,) = await stage.strike(Fault(0.0, Kind.WORKERS_ROLL, WORKERS))
    assert struck.outcome == f"skipped: w0 (pid {first.pid}) did not come back"
    assert second.returncode is None


def state(child: asyncio.subprocess.Process) -> str:
    return str(psutil.Process(child.pid).status())


async def test_a_process_is_frozen_for_a_time(stage: Stage) -> None:
    child = await stage.living.add("w0")
    frozen = asyncio.create_task(stage.strike(Fault(0.0, Kind.WORKER_FREEZE, "w0", 0.3)))

    async def stopped() -> bool:
        return state(child) == psutil.STATUS_STOPPED

    await until(stopped, within_s=5)
    (struck,) = await frozen
    assert state(child) != psutil.STATUS_STOPPED
    assert struck.healed_s - struck.at_s >= 0.3


async def test_a_process_that_is_ended_while_frozen(stage: Stage) -> None:
    child = await stage.living.add("w0")
    frozen = asyncio.create_task(stage.strike(Fault(0.0, Kind.WORKER_FREEZE, "w0", 0.3)))
    await asyncio.sleep(0.1)
    child.kill()
    await child.wait()
    (struck,) = await frozen
    assert struck.outcome == f"done: pid {child.pid} was ended meanwhile"


async def test_who_is_not_there_is_skipped_and_said_so(stage: Stage) -> None:
    struck = await stage.strike(Fault(0.0, Kind.WORKER_KILL, "w0"), Fault(0.1, Kind.BROKER_FLUSH, BROKER))
    assert [each.outcome for each in struck] == ["skipped: w0 does not run", "skipped: no server for n"]
    assert not any(each.done for each in struck)
    assert struck[1].at_s >= 0.1


@pytest.mark.parametrize(
    ("kind", "duration", "calls"),
    [
        (Kind.BROKER_KILL, 0.1, ["kill 0", "start"]),
        (Kind.BROKER_TORN, 0.1, ["kill 0.1", "start"]),
        (Kind.BROKER_TORN, 1.1, ["kill 1", "start"]),
        (Kind.BROKER_LOSS, 0.1, ["kill 0", "start empty"]),
    ],
)
async def test_the_broker_is_killed_and_comes_back(stage: Stage, kind: Kind, duration: float, calls: list[str]) -> None:
    (struck,) = await stage.strike(Fault(0.0, kind, BROKER, duration))
    assert (struck.outcome, stage.server.calls) == ("done", calls)


class Noting(Proxy):
    """Notes whether it is cut, whenever that may change."""

    def __init__(self, name: str, seen: list[tuple[str, bool]]) -> None:
        super().__init__(1)
        self.name, self.seen = name, seen

    def cut(self) -> None:
        super().cut()
        self.seen.append((self.name, is_cut(self)))

    def join(self) -> None:
        super().join()
        self.seen.append((self.name, is_cut(self)))


async def test_cuts_end_at_their_time_whatever_overlaps(stage: Stage) -> None:
    seen: list[tuple[str, bool]] = []
    stage.proxies.update({name: Noting(name, seen) for name in stage.proxies})
    struck = await stage.strike(
        Fault(0.0, Kind.WORKER_CUT, "w0", 0.4),
        Fault(0.1, Kind.BROKER_CUT, BROKER, 0.2),
        Fault(0.1, Kind.BROKER_SLOW, BROKER, 0.01),  # its end ends no cut
    )
    assert seen == [("w0", True), ("w0", True), ("g0", True), ("w0", True), ("g0", False), ("w0", False)]
    assert all(each.done for each in struck)


async def test_replies_are_slow_for_a_time(stage: Stage) -> None:
    running = asyncio.create_task(stage.strike(Fault(0.0, Kind.BROKER_SLOW, BROKER, 0.2)))

    async def slow() -> bool:
        return [proxy.delay_s for proxy in stage.proxies.values()] == [0.2, 0.2]

    await until(slow, within_s=5)
    assert (await running)[0].done
    assert [proxy.delay_s for proxy in stage.proxies.values()] == [0.0, 0.0]


def is_cut(proxy: Proxy) -> bool:
    return not proxy._flowing.is_set()


async def test_a_run_that_is_cut_off_leaves_all_healed(stage: Stage) -> None:
    child = await stage.living.add("w0")
    faults = [
        Fault(0.0, Kind.WORKER_FREEZE, "w0", 30.0),
        Fault(0.0, Kind.BROKER_CUT, BROKER, 30.0),
        Fault(0.0, Kind.BROKER_SLOW, BROKER, 30.0),
        Fault(0.0, Kind.BROKER_LOSS, BROKER, 30.0),
        Fault(25.0, Kind.WORKER_KILL, "w0"),
    ]
    running = asyncio.create_task(stage.nemesis.run(faults))

    async def struck() -> bool:
        return state(child) == psutil.STATUS_STOPPED and not stage.server.running

    await until(struck, within_s=5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert state(child) != psutil.STATUS_STOPPED
    assert stage.server.running
    assert [(is_cut(proxy), proxy.delay_s) for proxy in stage.proxies.values()] == [(False, 0.0)] * 2


async def test_a_reply_that_nobody_waits_for_is_not_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LOSE_WITHIN_S > 1
    monkeypatch.setattr("bench.chaos.nemesis.LOSE_WITHIN_S", 0.1)
    (struck,) = await stage.strike(Fault(0.0, Kind.LOST_REPLY, BROKER))
    assert struck.outcome.startswith("skipped: nobody called ")
    assert struck.outcome.endswith(" in 0.1 s")


async def test_every_kind_is_known(stage: Stage) -> None:
    """Whatever the schedule draws can be done: with nobody there, all are skipped or done, none fails."""
    for kind in Kind:
        target = {"worker": "w0", "gateway": "g0"}.get(NATURES[kind].scope, BROKER)
        stage.server.running = True
        if kind is not Kind.LOST_REPLY:  # waits for seconds, see above
            (struck,) = await stage.strike(Fault(0.0, kind, target, 0.01))
            assert struck.outcome.partition(":")[0] in ("done", "skipped")
