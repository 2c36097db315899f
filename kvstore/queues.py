"""How long the workers' queues are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import BrokerError
from kvstore.keys import GROUP

if TYPE_CHECKING:
    from kvstore.client import Broker


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One worker's stream. Entries leave it when their job ends."""

    worker: str
    stream: str
    """Its Redis key."""
    undelivered: int
    """Accepted, not yet read by the worker."""
    pending: int
    """Read by the worker, not ended."""
    oldest_age_ms: int
    """Since the submission of the oldest job in the stream, by the broker's clock; 0 when it is empty."""


async def queues(broker: Broker) -> list[QueueInfo]:
    """All workers' streams, by worker id. Two round trips, however many workers.

    Undelivered is counted as length - pending. ``XINFO GROUPS`` has a ``lag`` for it, but that is unknown as soon as
    entries are deleted from the middle of a stream, which is what every cancelled job does.
    """
    (seconds, micros), members = _checked(await broker.pipeline([("TIME",), ("ZRANGE", broker.keys.workers, 0, -1)]))
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    workers = sorted(member.decode(errors="replace") for member in members)
    commands: list[tuple[Any, ...]] = []
    for worker in workers:
        stream = broker.keys.jobs(worker)
        commands += [("XLEN", stream), ("XPENDING", stream, GROUP), ("XRANGE", stream, "-", "+", "COUNT", 1)]
    replies = await broker.pipeline(commands)
    found: list[QueueInfo] = []
    for number, worker in enumerate(workers):
        length, summary, oldest = replies[3 * number : 3 * number + 3]
        # Errors are a stream without a group (nothing pending), or a key of another type (nothing to tell).
        length = 0 if isinstance(length, BrokerError) else length
        pending = 0 if isinstance(summary, BrokerError) else int(summary["pending"])
        age = 0
        if not isinstance(oldest, BrokerError) and oldest:
            age = max(0, now_ms - int(oldest[0][0].split(b"-")[0]))
        # An entry that was trimmed by hand is pending, but no longer in the stream.
        found.append(QueueInfo(worker, broker.keys.jobs(worker), max(0, length - pending), pending, age))
    return found


def _checked(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, BrokerError):
            raise reply
    return replies
