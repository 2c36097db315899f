"""`octavo bench routing`: policies of gateways under the same loads, on the same workers, in turn."""

from __future__ import annotations

import math
import secrets
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bench.machine import describe_machine
from bench.replay_records import last_route, records_from_redis
from bench.routing_client import rate_of, saturate, send
from bench.routing_figures import Window, shown_first_token, summarise
from bench.routing_fleet import SETTLE_S, PolicyFleet
from bench.routing_verdicts import THEIRS, told_aims, told_lag, told_unanswered, versus
from ops.client import plain
from ops.config import POLICIES, usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.routing_client import Saturated
    from bench.routing_load import GroupedLoad, Scenario
    from octavo.v1 import fleet_pb2
    from ops.client import Client
    from ops.config import FleetConfig

CALIBRATION_S: Final = 20.0
"""For so long a fleet's rate is measured at least."""
MOST_CALIBRATION_S: Final = 120.0
"""And at most, where it is slow."""
ROUNDS: Final = 3
"""Between both it goes on until so many answers have come for each request that is under way: those that begin together
end together, and tell of no rate."""
PLACES_PER_WORKER: Final = 4
"""Requests under way at each worker while a fleet's rate is measured."""
FILL_PER_WORKER: Final = 2
"""The same while caches are filled: enough for all to work, and queues too short to move prefixes."""
EXTRA_S: Final = 2.0
"""Of a run, at most, for what is made before it and read after it."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """One sweep. Seconds throughout."""

    load: GroupedLoad
    scenarios: tuple[Scenario, ...]
    policies: tuple[str, ...] = POLICIES
    fill_s: float = 10.0
    """Before each run, of as many requests as the fleet answers: caches are then as the policy leaves them."""
    warm_s: float = 4.0
    """Of each run, before anything counts: queues are then as the load leaves them."""
    seconds: float = 30.0
    """Of each run, that count."""
    drain_s: float = 5.0
    """After each run, for what it has begun."""
    capacity: float | None = None
    """Answers per second of the fleet without hits, which loads are multiples of; None: measured first."""
    routes: int = 0
    """How many of the last decisions of each run, while it counts, are kept, too."""

    @property
    def runs(self) -> int:
        return len(self.scenarios) * len(self.policies)

    @property
    def most_s(self) -> float:
        """Of the whole sweep from when the fleet has started, when every phase ends with a full queue."""
        calibration = 0.0 if self.capacity else MOST_CALIBRATION_S + SETTLE_S
        run = self.fill_s + SETTLE_S + self.warm_s + self.seconds + self.drain_s + SETTLE_S + EXTRA_S
        return calibration + self.runs * run

    def told(self) -> str:
        """What it takes, before it begins."""
        limits = f"{CALIBRATION_S:g} to {MOST_CALIBRATION_S:g} s"
        first = "" if self.capacity else f"{limits} to measure what the fleet answers without hits, then "
        return (
            f"{first}{self.runs} runs: {self.fill_s:g} s to fill caches, {self.warm_s:g} s to warm up, "
            f"{self.seconds:g} s that count and up to {self.drain_s:g} s to drain; at most "
            f"{math.ceil(self.most_s / 60)} min once the fleet has started; Ctrl-C ends it with the figures so far"
        )

    def order(self, turn: int) -> tuple[str, ...]:
        """Policies of a scenario: another one goes first each time."""
        first = turn % len(self.policies)
        return (*self.policies[first:], *self.policies[:first])


@dataclass(slots=True)
class Results:
    """What is known so far; a sweep that is interrupted keeps it."""

    facts: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    routes: list[fleet_pb2.RouteRecord] = field(default_factory=list)
    """The last decisions of each run, where they were asked for."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        # As they are compared, not as they were run.
        order = list(dict.fromkeys((run["scenario"], run["load"]) for run in self.runs))
        runs = sorted(
            self.runs, key=lambda run: (order.index((run["scenario"], run["load"])), POLICIES.index(run["policy"]))
        )
        ratios = versus(runs)
        return {
            **self.facts,
            "complete": self.complete,
            "runs": runs,
            "versus_least_loaded": ratios,
            "told": [*told_unanswered(runs), *told_aims(ratios), told_lag(runs)],
        }


async def run_routing(
    config: RoutingConfig, settings: FleetConfig, results: Results, note: Callable[[str], None]
) -> None:
    """Runs the sweep; `results` is filled as runs end, so that what is there when it is cancelled can be told.

    Raises:
        ChildFailed: the fleet did not start, or its broker ended.
        KvError: the broker did not start.
        grpc.aio.AioRpcError: the fleet answers nothing.
    """
    results.facts["machine"] = describe_machine()
    note(config.told())
    async with AsyncExitStack() as stack:
        note(f"starting {settings.workers} worker(s) on {settings.model}, a gateway for each policy")
        fleet = await stack.enter_async_context(PolicyFleet(settings, config.policies, note))
        sweep = Sweep(config, fleet, results, note)
        await sweep.prepare(settings)
        for turn, scenario in enumerate(config.scenarios):
            for policy in config.order(turn):
                await sweep.run(scenario, policy)
                fleet.check()
        results.complete = True


class Sweep:
    """Runs on one fleet."""

    def __init__(
        self, config: RoutingConfig, fleet: PolicyFleet, results: Results, note: Callable[[str], None]
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._results = results
        self._note = note
        self._vocab_size = 0
        self._capacity = 0.0
        self._namespace = ""
        self._salt = secrets.token_hex(8)

    async def prepare(self, settings: FleetConfig) -> None:
        """Looks at the fleet, and measures what it answers without hits unless that was given.

        Raises:
            grpc.aio.AioRpcError: it answers nothing.
            ValueError: it answered nothing in time.
        """
        config, facts = self._config, self._results.facts
        self._namespace = settings.namespace
        policy = THEIRS if THEIRS in config.policies else config.policies[0]
        client = self._fleet.clients[policy]
        model, workers = await client.model(), await client.workers()
        self._vocab_size = model.vocab_size
        facts["model"] = plain(model)
        facts["fleet"] = {
            "workers": len(workers),
            "kv_tokens": workers[0].kv_tokens,
            "max_running": workers[0].max_running,
            "device": workers[0].device,
            "simulated": settings.model.startswith("simulated"),
            "threads_per_worker": settings.threads_per_worker(usable_cores()),
        }
        facts["config"] = {
            "model": settings.model,
            "prefix_tokens": config.load.prefix_tokens,
            "tail_tokens": str(config.load.tail_tokens),
            "output_tokens": str(config.load.output_tokens),
            "seed": config.load.seed,
            "fill_s": config.fill_s,
            "warm_s": config.warm_s,
            "seconds": config.seconds,
            "drain_s": config.drain_s,
            "scenarios": [asdict(scenario) for scenario in config.scenarios],
            "policies": list(config.policies),
        }
        if config.capacity is None:
            limits = f"{CALIBRATION_S:g} to {MOST_CALIBRATION_S:g} s"
            self._note(f"measuring what the fleet answers without hits, for {limits}")
            self._capacity = await self._measured(client, PLACES_PER_WORKER * len(workers))
        else:
            self._capacity = config.capacity
        if not self._capacity:
            raise ValueError(f"the fleet answered nothing within {MOST_CALIBRATION_S:g} s; take shorter prompts")
        facts["capacity_per_s"] = self._capacity
        facts["capacity_measured"] = config.capacity is None
        self._note(f"load 1 is {self._capacity:.2f} requests/s")

    async def run(self, scenario: Scenario, policy: str) -> None:
        """One run, whose figures go to the results."""
        config, runs = self._config, self._results.runs
        rate, whole = scenario.load * self._capacity, config.warm_s + config.seconds
        asks = config.load.asks(scenario, rate, whole, self._vocab_size)
        place = f"run {len(runs) + 1} of {config.runs}: {scenario.name}, load {scenario.load:g}, {policy}"
        self._note(f"{place}: {len(asks)} requests in {whole:g} s")
        salt = f"{self._salt}/{len(runs)}"
        client = self._fleet.clients[policy]
        if config.fill_s:
            await self._fill(client, scenario.groups, salt)
        last = await last_route(self._fleet.redis, self._namespace) if config.routes else ""
        before = await self._fleet.stolen()
        sent = await send(client, asks, salt=salt, seconds=whole, drain_s=config.drain_s)
        await self._fleet.settle()
        after = await self._fleet.stolen()
        if config.routes:
            await self._keep_routes(last, sent.began_unix_s)
        figures = summarise(sent.samples, Window(config.warm_s, whole))
        runs.append(
            {
                "scenario": scenario.name,
                "kind": scenario.kind,
                "ratio": scenario.ratio,
                "groups": scenario.groups,
                "load": scenario.load,
                "requests_per_s": rate,
                "policy": policy,
                **figures.as_dict(),
                "sent": len(asks),
                "stolen": None if before is None or after is None else after - before,
                "wall_s": sent.wall_s,
                "client_cpu": sent.cpu_s / sent.wall_s,
            }
        )
        self._note(told_run(runs[-1]))

    async def _keep_routes(self, last: str, began_unix_s: float) -> None:
        """Keeps the last decisions of a run that were made while it counted; `last` is the id of the one before it."""
        config = self._config
        window = Window(began_unix_s + config.warm_s, began_unix_s + config.warm_s + config.seconds)
        records = await records_from_redis(self._fleet.redis, self._namespace, after=last)
        counted = [each for each in records if window.has(each.decided_unix_ms / 1000)]
        self._results.routes += counted[-config.routes :]

    async def _measured(self, client: Client, places: int) -> float:
        """Answers per second without hits."""
        asks = self._config.load.endless(0, self._vocab_size)
        done = await saturate(
            client,
            asks,
            salt=self._salt,
            places=places,
            seconds=CALIBRATION_S,
            answers=ROUNDS * places,
            most_s=MOST_CALIBRATION_S,
        )
        await self._settled(done)
        return rate_of(done.ends, places)

    async def _fill(self, client: Client, groups: int, salt: str) -> None:
        asks = self._config.load.endless(groups, self._vocab_size)
        places = FILL_PER_WORKER * self._results.facts["fleet"]["workers"]
        await self._settled(await saturate(client, asks, salt=salt, places=places, seconds=self._config.fill_s))

    async def _settled(self, done: Saturated) -> None:
        """The fleet has nothing left to do."""
        for error, count in done.errors.items():
            self._note(f"  {count} of the requests beforehand failed: {error}")
        await self._fleet.settle()


def told_run(run: dict[str, Any]) -> str:
    """A run in a line, while others go on."""
    p50, p90 = (shown_first_token(run, rank) for rank in ("p50", "p90"))
    latency = f"TTFT p50 {p50}, p90 {p90}" if run["first_token_s"] else "no first token"
    hits = "-" if run["hit_rate"] is None else f"{run['hit_rate']:.0%}"
    lost = run["refused"] + run["unanswered"] + sum(run["errors"].values())
    return f"  {latency}, {run['tokens_per_s']:,.0f} tokens/s, {hits} hits" + (f", {lost} not answered" if lost else "")
