"""`octavo bench recovery`: what clients see when a worker goes, in the ways that workers go.

::

    each payload once, alone, nothing fails: the right answers
    each scenario: all streams at once -> every one has some tokens -> the strike -> all have ended -> the checker
    in the end: what is left in the broker, the pools and the figures -> the checker
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

from bench.chaos.checker import FENCED, check, oracle_of
from bench.chaos.driver import Driver, Habits
from bench.chaos.evidence import Rules, Run
from bench.chaos.fleet import ChaosFleet
from bench.chaos.history import Came, Recorder, gather
from bench.chaos.nemesis import Nemesis
from bench.chaos.recovery_figures import Outcome, attempts, errors, finished, recoveries
from bench.chaos.run import Watch, evidence
from bench.chaos.scenarios import RecoveryConfig, Scenario, faults_of, streams_of
from bench.chaos.schedule import WORKERS
from bench.chaos.server import Server
from bench.chaos.snapshot import scrape
from bench.chaos.waiting import until
from bench.machine import describe_machine
from kvstore.jobs import Jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bench.chaos.evidence import Answer
    from bench.chaos.findings import Finding
    from bench.chaos.history import Event, Request
    from bench.chaos.traffic import Payload
    from ops.child import LineSink
    from ops.config import FleetConfig

RULES: Final = Rules()
FENCED_S: Final = 10.0
"""For so long a worker that woke up is asked whether its late writes were refused."""


class Milestone(Recorder):
    """A recorder that says when so many requests have so many tokens each."""

    def __init__(self, requests: int, tokens: int, out: TextIO | None = None) -> None:
        super().__init__(out)
        self.reached = asyncio.Event()
        self._requests, self._tokens = requests, tokens
        self._counts: Counter[str] = Counter()
        self._there: set[str] = set()

    def note(self, event: Event) -> None:
        super().note(event)
        if isinstance(event, Came):
            self._counts[event.request] += len(event.tokens)
            if self._counts[event.request] >= self._tokens:
                self._there.add(event.request)
            if len(self._there) >= self._requests:
                self.reached.set()


async def run_recovery(
    config: RecoveryConfig, settings: FleetConfig, folder: Path, note: Callable[[str], None], sink: LineSink
) -> dict[str, Any]:
    """``folder`` gets the broker's data and a history for each scenario. What is printed as JSON.

    Raises:
        ChildFailed, KvError: the fleet does not start.
        NoOracle: it does not serve without faults.
        TimeoutError: it does not come back.
    """
    machine = describe_machine()
    server = Server(folder / "broker")
    await server.start(empty=True)  # an earlier run may have used the folder
    try:
        async with ChaosFleet(settings, server, sink, note) as fleet:
            asked = streams_of(config)
            oracle = await _alone(config, fleet, asked, note)
            watch = Watch(fleet.endpoints)
            scene, outcomes = Scene(config, fleet, oracle, note), []
            for each in config.scenarios:
                with (folder / f"{each.value}.jsonl").open("w") as out:
                    outcomes.append(await scene.play(each, asked, out))
            await watch.look()
            left = await evidence(fleet, Recorder(), oracle, watch)
    finally:
        await server.stop()
    return told(machine, outcomes, check(left, RULES))


def told(machine: dict[str, Any], outcomes: Sequence[Outcome], left: Sequence[Finding]) -> dict[str, Any]:
    """For JSON. ``left``: what was found in what all scenarios together have left behind."""
    return {
        "machine": machine,
        "scenarios": [outcome.as_dict() for outcome in outcomes],
        "cells": [outcome.cells() for outcome in outcomes],
        "left": [str(each) for each in left],
        "passed": all(outcome.passed for outcome in outcomes) and not left,
    }


async def _alone(
    config: RecoveryConfig, fleet: ChaosFleet, asked: Sequence[Payload], note: Callable[[str], None]
) -> dict[str, Answer]:
    recorder = Recorder()
    async with Driver(fleet.targets, recorder, seed=config.seed, prefix="alone-") as driver:
        await driver.ask_each(asked, at_once=1)
    note(f"{len(asked)} payloads were answered, each alone")
    return oracle_of(gather(recorder.events).values())


@dataclass(frozen=True, slots=True)
class _Done:
    """What a scenario did."""

    worker: str
    """That was struck."""
    at: float
    """When, by the history's clock."""
    fenced: float
    """Writes of it that had been refused before."""
    struck: list[str]


class Scene:
    """Plays scenarios on one fleet."""

    def __init__(
        self, config: RecoveryConfig, fleet: ChaosFleet, oracle: Mapping[str, Answer], note: Callable[[str], None]
    ) -> None:
        self._config, self._fleet, self._oracle, self._note = config, fleet, oracle, note

    async def play(self, scenario: Scenario, asked: Sequence[Payload], out: TextIO) -> Outcome:
        """From all quiet to all quiet. ``out`` gets the history."""
        config, fleet = self._config, self._fleet
        await fleet.until_served()
        recorder = Milestone(len(asked), config.after, out)
        habits = Habits(deadline_s=config.deadline_s)
        async with Driver(fleet.targets, recorder, seed=config.seed, habits=habits, prefix=f"{scenario}-") as driver:
            if scenario is Scenario.ROLL:
                done = await self._steadily(driver, asked)
            else:
                done = await self._all_at_once(driver, asked, scenario, recorder)
        for each in done.struck:
            self._note(each)
        return await self._outcome(scenario, done, gather(recorder.events))

    async def _outcome(self, scenario: Scenario, done: _Done, requests: Mapping[str, Request]) -> Outcome:
        moved = sum(attempts(request) > 1 for request in requests.values())
        comes_back = scenario in (Scenario.FREEZE, Scenario.CUT) and moved > 0
        refused = await self._refused(done.worker, done.fenced) if comes_back else 0
        return Outcome(
            scenario=scenario.value,
            struck=done.struck,
            streams=len(requests),
            finished=finished(list(requests.values())),
            moved=moved,
            again=sum(len(request.streams) > 1 for request in requests.values()),
            errors=errors(requests.values()),
            recovery_s=recoveries(requests.values(), done.at),
            fenced=refused,
            findings=check(Run(requests, self._oracle), RULES),
            expects_errors=scenario is Scenario.PAIR,
            # One that was frozen may be told first that its jobs are elsewhere, and write nothing.
            expects_fenced=comes_back and scenario is Scenario.CUT,
        )

    def _nemesis(self) -> Nemesis:
        fleet = self._fleet
        return Nemesis(
            processes=fleet,
            server=fleet.server,
            proxies=fleet.proxies,
            namespace=fleet.config.namespace,
            seed=self._config.seed,
        )

    async def _all_at_once(
        self, driver: Driver, asked: Sequence[Payload], scenario: Scenario, recorder: Milestone
    ) -> _Done:
        """Strikes the busiest worker when every stream has its tokens; nobody when all are over before that."""
        async with asyncio.timeout(self._config.deadline_s), asyncio.TaskGroup() as group:
            asking = group.create_task(driver.ask_each(asked, at_once=len(asked)))
            if not await _before(recorder.reached, asking):
                self._note(f"{scenario}: all were over before each had {self._config.after} tokens, nobody was struck")
                return _Done("", time.monotonic(), 0.0, [])
            worker = await self._busiest()
            fenced = await self._fenced(worker)
            at = time.monotonic()
            struck = await self._nemesis().run(faults_of(scenario, self._config, worker, self._fleet.gateways[0]))
        return _Done(worker, at, fenced, [str(each) for each in struck])

    async def _busiest(self) -> str:
        """The worker with the most jobs."""
        broker = await self._fleet.server.connect(self._fleet.config.namespace)
        try:
            queues = await Jobs(broker).queues()
        finally:
            await broker.close()
        return max(queues, key=lambda queue: queue.undelivered + queue.pending).worker

    async def _steadily(self, driver: Driver, asked: Sequence[Payload]) -> _Done:
        """Sends at the rate while all workers are restarted."""
        numbers, over = random.Random(f"steady/{self._config.seed}"), asyncio.Event()

        async def load() -> None:
            async with asyncio.TaskGroup() as calls:
                while not over.is_set():
                    calls.create_task(driver.send(numbers.choice(asked)))
                    await _first(over, numbers.expovariate(self._config.rate))

        async with asyncio.TaskGroup() as group:
            group.create_task(load())
            at = time.monotonic()
            struck = await self._nemesis().run(faults_of(Scenario.ROLL, self._config, WORKERS, ""))
            over.set()
        return _Done(WORKERS, at, 0.0, [str(each) for each in struck])

    async def _fenced(self, name: str) -> float:
        """What the process with that name counts now; 0 when none does."""
        address = next((at for life, at in self._fleet.endpoints().items() if life.partition("/")[0] == name), "")
        page = await scrape(address) if address else None
        return page.counters.get(FENCED, 0.0) if page else 0.0

    async def _refused(self, name: str, before: float) -> int:
        """How many late writes it has counted since; 0 when it counts none in time."""
        now = before

        async def counted() -> bool:
            nonlocal now
            now = await self._fenced(name)
            return now > before

        try:
            await until(counted, within_s=FENCED_S)
        except TimeoutError:
            return 0
        return round(now - before)


async def _before(event: asyncio.Event, task: asyncio.Task[None]) -> bool:
    """Whether the event comes before the task's end; returns at the first of them."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return event.is_set()


async def _first(event: asyncio.Event, seconds: float) -> None:
    """Waits for the event, so many seconds at most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
