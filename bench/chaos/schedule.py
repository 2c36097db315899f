"""When which fault strikes whom, and for how long: drawn from a seed, the same for the same seed. Pure.

Rules, whatever the seed:

* One worker and one gateway are always left alone, unless ``Plan.all_at_once``. In a rolling restart, which strikes all
  workers, one of them is away at a time, and nothing else strikes a worker.
* A process has one fault at a time; so has the broker.
* The first seconds and the last are quiet, and whatever strikes is healed before the last begin.
* Each kind that is asked for strikes before any strikes again, as far as time allows.
* With ``Plan.last_kill`` a worker is killed behind all that strikes workers or makes the broker lose something: so in
  the end there are jobs that another worker went on with, and the broker knows that.

Faults of different processes, and of a process and the broker, may overlap: pairs are where the harder bugs are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Kind(StrEnum):
    """A kind of fault."""

    WORKER_KILL = "worker-kill"
    WORKER_FREEZE = "worker-freeze"
    """SIGSTOP, and SIGCONT after the duration."""
    WORKER_TERM = "worker-term"
    WORKERS_ROLL = "workers-roll"
    """All are told to end, one after the other, each when the one before it is back."""
    WORKER_CUT = "worker-cut"
    """No byte passes between it and the broker, either way; connections stay open."""
    GATEWAY_KILL = "gateway-kill"
    GATEWAY_FREEZE = "gateway-freeze"
    GATEWAY_TERM = "gateway-term"
    GATEWAY_CUT = "gateway-cut"
    BROKER_KILL = "broker-kill"
    """SIGKILL, and a start with its append-only file after the duration."""
    BROKER_TORN = "broker-torn"
    """As BROKER_KILL, and the last second before it is not in the file."""
    BROKER_LOSS = "broker-loss"
    """SIGKILL, and a start without any data after the duration."""
    BROKER_FLUSH = "broker-flush"
    BROKER_PAUSE = "broker-pause"
    """It takes commands, and answers none."""
    BROKER_CUT = "broker-cut"
    """As WORKER_CUT, for all processes."""
    BROKER_SLOW = "broker-slow"
    """Every reply comes 200 ms later."""
    LOST_REPLY = "lost-reply"
    """Of one write; it was applied, and the connection is closed."""
    RESET = "reset"
    """All connections to the broker are closed."""
    DUPLICATE = "duplicate"
    """A job that is being run is delivered to somebody else besides."""


WORKER: Final = "worker"
GATEWAY: Final = "gateway"
BROKER: Final = "broker"
WORKERS: Final = "workers"
"""All of them."""


@dataclass(frozen=True, slots=True)
class Nature:
    """What is true of all faults of a kind."""

    scope: str
    """WORKER, GATEWAY, BROKER or WORKERS: whom it strikes."""
    shortest_s: float = 0.0
    longest_s: float = 0.0
    restarts: bool = False
    """The process has to start again, which takes ``Plan.start_s`` after the duration; of WORKERS, each of them."""
    drains: bool = False
    """Before that it ends by itself, in ``Plan.drain_s``."""
    settles_s: float = 0.0
    """After the duration, until the next fault of its target."""
    instant: bool = False
    """It is over at once, and may meet another fault of its scope."""


NATURES: Final[Mapping[Kind, Nature]] = {
    Kind.WORKER_KILL: Nature(WORKER, restarts=True),
    Kind.WORKER_FREEZE: Nature(WORKER, 2.0, 15.0),
    Kind.WORKER_TERM: Nature(WORKER, restarts=True, drains=True),
    Kind.WORKERS_ROLL: Nature(WORKERS, restarts=True, drains=True),
    Kind.WORKER_CUT: Nature(WORKER, 2.0, 10.0),
    Kind.GATEWAY_KILL: Nature(GATEWAY, restarts=True),
    # Beyond what keeps a connection alive, so that clients leave; within what workers grant jobs without a gateway.
    Kind.GATEWAY_FREEZE: Nature(GATEWAY, 2.0, 22.0),
    Kind.GATEWAY_TERM: Nature(GATEWAY, restarts=True, drains=True),
    Kind.GATEWAY_CUT: Nature(GATEWAY, 2.0, 22.0),
    Kind.BROKER_KILL: Nature(BROKER, 0.5, 5.0, settles_s=2.0),
    Kind.BROKER_TORN: Nature(BROKER, 1.5, 5.0, settles_s=2.0),
    Kind.BROKER_LOSS: Nature(BROKER, 0.5, 3.0, settles_s=2.0),
    Kind.BROKER_FLUSH: Nature(BROKER, settles_s=1.0),
    Kind.BROKER_PAUSE: Nature(BROKER, 0.5, 4.0),
    Kind.BROKER_CUT: Nature(BROKER, 2.0, 10.0),
    Kind.BROKER_SLOW: Nature(BROKER, 3.0, 10.0),
    Kind.LOST_REPLY: Nature(BROKER, instant=True),
    Kind.RESET: Nature(BROKER, instant=True),
    Kind.DUPLICATE: Nature(BROKER, instant=True),
}

LOSING: Final = frozenset({Kind.BROKER_TORN, Kind.BROKER_LOSS, Kind.BROKER_FLUSH})
"""Those behind which the broker may lack what it has answered for."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them. Times in seconds since the start of the run."""

    at_s: float
    kind: Kind
    target: str
    """Name of a process, WORKERS or BROKER."""
    duration_s: float = 0.0
    """0: it is done at once; what it ended has to come back by itself."""

    def __str__(self) -> str:
        lasts = f"for {self.duration_s:.1f} s" if self.duration_s else "at once"
        return f"{self.at_s:7.1f} s  {self.kind:14}  {self.target:8}  {lasts}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a schedule is drawn for."""

    seconds: float
    workers: tuple[str, ...]
    gateways: tuple[str, ...]
    kinds: tuple[Kind, ...] = tuple(Kind)
    every_s: float = 6.0
    """Mean time from one fault to the next."""
    pairs: float = 0.25
    """Share of faults that are followed by the next within a second."""
    warm_s: float = 3.0
    calm_s: float = 10.0
    start_s: float = 8.0
    """What a process may take from its end until it serves again."""
    drain_s: float = 0.0
    """What a process that is told to end may take until it has."""
    all_at_once: bool = False
    last_kill: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """Faults in order of time."""

    seed: int
    plan: Plan
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        head = f"seed {self.seed}: {len(self.faults)} faults in {self.plan.seconds:g} s"
        return "\n".join([head, *map(str, self.faults)])

    def counts(self) -> dict[str, int]:
        """How many of each kind, those that there are none of left out."""
        kinds = [fault.kind.value for fault in self.faults]
        return {kind.value: kinds.count(kind.value) for kind in Kind if kind.value in kinds}


def recovery_s(nature: Nature, plan: Plan) -> float:
    """Seconds from the end of a fault's duration until its target may be struck again."""
    if not nature.restarts:
        return nature.settles_s
    each = plan.start_s + (plan.drain_s if nature.drains else 0.0)
    return each * (len(plan.workers) if nature.scope == WORKERS else 1)


def draw(seed: int, plan: Plan) -> Schedule:
    """The schedule of a seed. Raises ValueError for a plan without time or without anybody to strike."""
    if plan.seconds <= plan.warm_s + plan.calm_s:
        raise ValueError(f"{plan.seconds:g} s leave no time: {plan.warm_s:g} + {plan.calm_s:g} s of them are quiet")
    if not plan.kinds:
        raise ValueError("no kind of fault to draw from")
    numbers = random.Random(f"chaos/{seed}")
    made = _Making(plan, numbers)
    now = plan.warm_s
    while now < plan.seconds - plan.calm_s:
        made.strike(now)
        close = numbers.random() < plan.pairs
        now += numbers.uniform(0.0, 1.0) if close else numbers.expovariate(1.0 / plan.every_s)
    made.kill_last()
    return Schedule(seed, plan, tuple(sorted(made.faults, key=lambda fault: fault.at_s)))


class _Making:
    """What has been drawn so far, and who is still busy with it."""

    def __init__(self, plan: Plan, numbers: random.Random) -> None:
        self.faults: list[Fault] = []
        self._plan = plan
        self._numbers = numbers
        self._busy_until = dict.fromkeys((*plan.workers, *plan.gateways, BROKER), 0.0)
        self._deck: list[Kind] = []
        self._heals_by = plan.seconds - plan.calm_s
        kill = NATURES[Kind.WORKER_KILL]
        last = self._heals_by - recovery_s(kill, plan)
        possible = bool(self._free(kill, last)) and Kind.WORKER_KILL in plan.kinds and last > plan.warm_s
        self._last_kill = last if plan.last_kill and possible else None

    def kill_last(self) -> None:
        """The last fault that strikes a worker, if there is to be one."""
        if self._last_kill is not None:
            target = self._numbers.choice(self._free(NATURES[Kind.WORKER_KILL], self._last_kill))
            self.faults.append(Fault(round(self._last_kill, 3), Kind.WORKER_KILL, target))

    def _until(self, kind: Kind) -> float:
        """When all has to be healed that a fault of this kind does."""
        before = NATURES[kind].scope in (WORKER, WORKERS) or kind in LOSING
        return self._last_kill if before and self._last_kill is not None else self._heals_by

    def strike(self, now: float) -> None:
        """One fault at ``now``, if there is one that the rules allow."""
        if not self._deck:
            self._deck = list(dict.fromkeys(self._plan.kinds))
            self._numbers.shuffle(self._deck)
        for kind in self._deck:
            nature = NATURES[kind]
            duration = self._numbers.uniform(nature.shortest_s, nature.longest_s)
            until = now + duration + recovery_s(nature, self._plan)
            targets = self._free(nature, now)
            if targets and until <= self._until(kind):
                target = self._numbers.choice(targets)
                self._deck.remove(kind)
                if not nature.instant:
                    struck = self._plan.workers if target == WORKERS else (target,)
                    self._busy_until.update(dict.fromkeys(struck, until))
                self.faults.append(Fault(round(now, 3), kind, target, round(duration, 3)))
                return

    def _free(self, nature: Nature, now: float) -> Sequence[str]:
        if nature.instant:
            return [BROKER]
        if nature.scope == WORKERS:
            workers = self._free(Nature(WORKER), now)
            return [WORKERS] if len(workers) == len(self._plan.workers) else []
        whole = {WORKER: self._plan.workers, GATEWAY: self._plan.gateways, BROKER: (BROKER,)}[nature.scope]
        free = [name for name in whole if self._busy_until[name] <= now]
        if nature.scope != BROKER and not self._plan.all_at_once and len(free) < 2:
            return []
        return free
