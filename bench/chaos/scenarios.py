"""In what ways a worker goes, and what is sent meanwhile. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bench.chaos.schedule import WORKERS, Fault, Kind
from bench.chaos.traffic import Payload, payloads

PAIR_S: Final = 0.5
"""Between a gateway's death and a worker's."""


class Scenario(StrEnum):
    """How a worker goes."""

    KILL = "kill"
    """SIGKILL."""
    PAIR = "pair"
    """SIGKILL to a gateway, and to a worker half a second later."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT when its jobs have long been elsewhere."""
    CUT = "cut"
    """Nothing passes between it and the broker for as long. It goes on, and what it writes arrives late."""
    ROLL = "roll"
    """SIGTERM to one worker after the other, under a steady load."""


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """One run. Times in seconds."""

    scenarios: tuple[Scenario, ...] = tuple(Scenario)
    streams: int = 64
    """Half of them greedy, half seeded."""
    tokens: int = 64
    """Of each answer."""
    after: int = 5
    """Tokens that each stream has when its worker is struck."""
    freeze_s: float = 15.0
    rate: float = 2.0
    """Requests per second of the steady load."""
    deadline_s: float = 240.0
    seed: int = 0


def streams_of(config: RecoveryConfig) -> list[Payload]:
    """Payloads of one choice that all have the same number of tokens, so that none has ended when the strike comes."""
    made = payloads(config.seed, config.streams, tokens=(config.tokens, config.tokens))
    for payload in made:
        payload.request.n = 1
        payload.request.stopping.ignore_eos = True
        payload.request.stopping.ClearField("stop")
    return made


def faults_of(scenario: Scenario, config: RecoveryConfig, worker: str, gateway: str) -> list[Fault]:
    """What strikes whom, from the moment on that the streams have their tokens."""
    return {
        Scenario.KILL: [Fault(0.0, Kind.WORKER_KILL, worker)],
        Scenario.PAIR: [Fault(0.0, Kind.GATEWAY_KILL, gateway), Fault(PAIR_S, Kind.WORKER_KILL, worker)],
        Scenario.FREEZE: [Fault(0.0, Kind.WORKER_FREEZE, worker, config.freeze_s)],
        Scenario.CUT: [Fault(0.0, Kind.WORKER_CUT, worker, config.freeze_s)],
        Scenario.ROLL: [Fault(0.0, Kind.WORKERS_ROLL, WORKERS)],
    }[scenario]
