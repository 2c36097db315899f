"""A whole run: the oracle, a load with faults, what is left, and the verdict.

::

    start a fleet -> ask every payload once, nothing fails: the oracle
                  -> clients at a rate, while the nemesis follows the schedule
                  -> healed: probes, quiet, evidence -> checker, and the mutations of this very run
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from bench.chaos.checker import Figures, check, figures, oracle_of
from bench.chaos.driver import Driver, Habits
from bench.chaos.evidence import Rules, Run
from bench.chaos.findings import INVARIANTS, told
from bench.chaos.fleet import ChaosFleet
from bench.chaos.history import Recorder, gather
from bench.chaos.mutations import good_part, prove, table
from bench.chaos.nemesis import Nemesis
from bench.chaos.outages import outages
from bench.chaos.schedule import LOSING, Kind, Plan, draw
from bench.chaos.server import Server
from bench.chaos.silences import silences
from bench.chaos.snapshot import is_idle, pools, scrape, snapshot
from bench.chaos.traffic import bad_payloads, payloads
from bench.chaos.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from bench.chaos.evidence import Answer, Scrape
    from bench.chaos.findings import Finding
    from bench.chaos.mutations import Proof
    from bench.chaos.nemesis import Struck
    from bench.chaos.schedule import Schedule
    from ops.child import LineSink
    from ops.config import FleetConfig

SCRAPE_EVERY_S: Final = 2.0
IDLE_S: Final = 60.0
"""After the last client has its answer, nobody has anything to do within this time, or what is left is found: longer
than a worker goes on with a job whose gateway has died."""


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """One run. Times in seconds."""

    seed: int = 0
    seconds: float = 60.0
    payloads: int = 48
    """Different ones, each asked for once before the faults."""
    tokens: tuple[int, int] = (8, 96)
    """Of an answer: the least and the most that may be allowed."""
    kinds: tuple[Kind, ...] = tuple(Kind)
    every_s: float = 6.0
    start_s: float = 8.0
    """What a process may take to come back."""
    calm_s: float = 15.0
    habits: Habits = field(default_factory=Habits)
    share: float | None = None
    """Of the requests per second that the fleet answers without faults clients send no more than this; None: whatever
    their habits are. What is asked of a fleet that can't bear it expires for that alone."""
    rules: Rules = field(default_factory=Rules)
    mutations: int = 2
    """How often each is tried on what the run has left."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is told of a run."""

    schedule: Schedule
    struck: list[Struck]
    rate: float
    """Requests per second that clients sent."""
    figures: Figures
    silences: dict[str, float]
    """Of the requests that were finished: see ``silences``."""
    findings: list[Finding]
    proofs: list[Proof]

    @property
    def passed(self) -> bool:
        """Nothing was found, and the checker was seen to see: of each invariant at least one lie."""
        seen = {proof.invariant for proof in self.proofs if proof.caught}
        return not self.findings and all(proof.holds for proof in self.proofs) and seen == set(INVARIANTS)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seed": self.schedule.seed,
            "seconds": self.schedule.plan.seconds,
            "faults": dict(Counter(each.fault.kind.value for each in self.struck if each.done)),
            "skipped": sum(not each.done for each in self.struck),
            "rate": self.rate,
            "figures": self.figures.as_dict(),
            "longest_silence_s": self.silences,
            "findings": [str(each) for each in self.findings],
            "mutations": {proof.mutation: [proof.tried, proof.caught] for proof in self.proofs},
            "passed": self.passed,
        }

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {count}" for name, count in self.figures.as_dict().items())
        faults = "\n".join(f"  {each}" for each in self.struck)
        injected = sum(each.done for each in self.struck)
        head = f"seed {self.schedule.seed}: {injected} faults injected, {self.rate:.2f} requests/s"
        waits = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.silences.items())
        lines = (
            head,
            faults,
            numbers,
            f"longest silence in an answer: {waits}",
            told(self.findings),
            table(self.proofs),
        )
        return "\n".join(lines)


class Watch:
    """Scrapes everybody now and then."""

    def __init__(self, endpoints: Callable[[], Mapping[str, str]]) -> None:
        self._endpoints = endpoints
        self._pages: dict[str, list[Scrape]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(SCRAPE_EVERY_S)

    async def look(self) -> None:
        """One more page of each that shows one."""
        now = dict(self._endpoints())
        for life, page in zip(now, await asyncio.gather(*map(scrape, now.values())), strict=True):
            if page is not None:
                self._pages.setdefault(life, []).append(page)

    async def sees_idle(self) -> bool:
        """Looks again, whether all gauges of those that live are 0."""
        await self.look()
        return not any(value for pages in self.pages().values() for value in pages[-1].gauges.values())

    def pages(self) -> dict[str, tuple[Scrape, ...]]:
        """Of all lives. Gauges of those that are over say nothing about the end."""
        living = self._endpoints()
        return {
            life: tuple(pages if life in living else [replace(page, gauges={}) for page in pages])
            for life, pages in self._pages.items()
        }


async def run_chaos(
    config: ChaosConfig, settings: FleetConfig, folder: Path, note: Callable[[str], None], sink: LineSink
) -> Report:
    """``folder`` gets ``history.jsonl`` and the broker's data. Raises ChildFailed and KvError when the fleet does not
    start, NoOracle when it does not even serve without faults, TimeoutError when it does not come back."""
    server = Server(folder / "broker")
    await server.start(empty=True)  # an earlier run may have used the folder
    try:
        async with ChaosFleet(settings, server, sink, note) as fleet:
            schedule, struck, rate, run = await _on_fleet(config, fleet, folder, note)
    finally:
        await server.stop()
    # When all is over: it computes for long, and the proxies are in this process.
    loses = any(each.done and each.fault.kind in LOSING for each in struck)
    rules = replace(config.rules, broker_loses=loses)
    findings = check(run, rules)
    proofs = prove(good_part(run, rules, seed=config.seed), rules, seed=config.seed, times=config.mutations)
    counted, waits = figures(run, findings), silences(run.requests.values())
    return Report(schedule, struck, rate, counted, waits, findings, proofs)


async def _on_fleet(
    config: ChaosConfig, fleet: ChaosFleet, folder: Path, note: Callable[[str], None]
) -> tuple[Schedule, list[Struck], float, Run]:
    plan = Plan(
        *(config.seconds, fleet.workers, fleet.gateways, config.kinds),
        every_s=config.every_s,
        start_s=config.start_s,
        calm_s=config.calm_s,
        drain_s=fleet.config.grace,
        last_kill=True,
    )
    schedule = draw(config.seed, plan)
    note(str(schedule))
    began = time.monotonic()
    oracle = await _ask_without_faults(config, fleet)
    served = len(oracle) / (time.monotonic() - began)
    rate = bearable(config, served)
    note(f"{len(oracle)} payloads were answered without faults, {served:.2f} a second; clients send {rate:.2f}")
    config = replace(config, habits=replace(config.habits, rate=rate))
    watch = Watch(fleet.endpoints)
    with (folder / "history.jsonl").open("w") as out:
        recorder = Recorder(out)
        struck, began_at = await _under_faults(config, fleet, schedule, recorder, watch, note)
    run = await evidence(fleet, recorder, oracle, watch)
    return schedule, struck, rate, replace(run, outages=outages(struck, plan, began_at))


def bearable(config: ChaosConfig, served: float) -> float:
    """Requests per second that are sent to a fleet that answers so many without faults."""
    return config.habits.rate if config.share is None else min(config.habits.rate, config.share * served)


async def _ask_without_faults(config: ChaosConfig, fleet: ChaosFleet) -> dict[str, Answer]:
    recorder = Recorder()
    async with Driver(fleet.targets, recorder, seed=config.seed, prefix=f"o{config.seed}-") as driver:
        await driver.ask_each(payloads(config.seed, config.payloads, tokens=config.tokens))
    return oracle_of(gather(recorder.events).values())


async def _under_faults(
    config: ChaosConfig,
    fleet: ChaosFleet,
    schedule: Schedule,
    recorder: Recorder,
    watch: Watch,
    note: Callable[[str], None],
) -> tuple[list[Struck], float]:
    """What was done, and when it began, by the history's clock."""
    nemesis = Nemesis(
        processes=fleet,
        server=fleet.server,
        proxies=fleet.proxies,
        namespace=fleet.config.namespace,
        seed=config.seed,
        note=note,
    )
    asked = payloads(config.seed, config.payloads, tokens=config.tokens)
    seed, habits = config.seed, config.habits
    watching = asyncio.create_task(watch.run())
    try:
        async with Driver(fleet.targets, recorder, seed=seed, habits=habits, prefix=f"r{seed}-") as driver:
            async with asyncio.TaskGroup() as group:
                striking = group.create_task(nemesis.run(schedule.faults))
                group.create_task(driver.load(asked, bad_payloads(), config.seconds))
            await fleet.until_served()
            await driver.probe(asked)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return striking.result(), nemesis.began_at


async def evidence(fleet: ChaosFleet, recorder: Recorder, oracle: Mapping[str, Answer], watch: Watch) -> Run:
    broker = await fleet.server.connect(fleet.config.namespace)
    try:
        with suppress(TimeoutError):  # what is left is found
            await until(lambda: is_idle(broker), within_s=IDLE_S)
            await until(watch.sees_idle, within_s=IDLE_S)
        return Run(gather(recorder.events), oracle, await snapshot(broker), await pools(broker), watch.pages())
    finally:
        await broker.close()
