"""The ledger: what became of all jobs that were ever accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from kvstore.client import Broker

_OF_FINISH: Final = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: "",
    inference_pb2.STOP: "finished",
    inference_pb2.LENGTH: "finished",
    inference_pb2.CANCELLED: "cancelled",
}
_OF_FAILURE: Final = {job_pb2.FAILURE_DEADLINE: "expired", job_pb2.FAILURE_DEAD: "dead"}


@dataclass(frozen=True, slots=True)
class Ledger:
    """How many jobs were accepted, and what became of them, in one moment."""

    accepted: int
    finished: int
    """They have their answers."""
    failed: int
    cancelled: int
    expired: int
    """Their deadlines passed."""
    dead: int
    """Too many workers died of them."""
    in_flight: int
    """Entries in the workers' streams. It is counted there, and nobody's sum: so the rest can be checked against it."""

    @property
    def ended(self) -> int:
        """Jobs that have ended, in whatever way."""
        return self.finished + self.failed + self.cancelled + self.expired + self.dead

    @property
    def holds(self) -> bool:
        """Whether it adds up: nothing that was accepted is lost, and nothing has ended twice."""
        return not self.missing

    @property
    def missing(self) -> int:
        """How many jobs were accepted and are nowhere; below zero: how many were counted that never were accepted."""
        return self.accepted - self.ended - self.in_flight


def outcome(finish: inference_pb2.FinishReason, failure: job_pb2.Failure) -> str:
    """A job's field in the ledger, by how it ended; empty for a finish that is none."""
    return _OF_FINISH[finish] if finish in _OF_FINISH else _OF_FAILURE.get(failure, "failed")


async def read(broker: Broker) -> Ledger:
    """See ``Jobs.ledger``."""
    keys = broker.keys
    return Ledger(*map(int, await broker.script("ledger", [keys.ledger, keys.workers], [keys.prefix])))
