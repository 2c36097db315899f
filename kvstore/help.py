"""Calls for help among workers whose pages are the same bits: who has jobs waiting that others may take.

A call is a hint and may be lost. It is repeated while there is reason, and ``Jobs.steal`` judges for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.doorbell import RECONNECTED, Doorbell
from kvstore.errors import BrokerError
from kvstore.keys import GROUP
from kvstore.worker_info import LOAD_FIELDS, Load, parse_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.client import Broker


@dataclass(frozen=True, slots=True)
class Call:
    """A worker has jobs that it can't read yet. Times in seconds, by its own estimate."""

    worker: str
    wait_s: float
    """Until the first of them has its first token."""
    place_s: float
    """Until one more of its places becomes free."""

    def encode(self) -> str:
        return f"{self.wait_s:.6g} {self.place_s:.6g} {self.worker}"


def parse_call(payload: bytes) -> Call | None:
    """None for what no worker has written."""
    try:
        wait_s, place_s, worker = payload.decode().split(" ", 2)
        call = Call(worker, float(wait_s), float(place_s))
    except ValueError:
        return None
    times = (call.wait_s, call.place_s)
    return call if worker and all(0 <= seconds < math.inf for seconds in times) else None


class HelpLine:
    """Calls and hears those of other workers with the same fingerprint. Methods raise BrokerError."""

    def __init__(self, broker: Broker, fingerprint: str) -> None:
        self._broker = broker
        self._channel = broker.keys.help(fingerprint)
        self._bell = Doorbell(broker)

    async def open(self) -> None:
        """What is called from now on is heard."""
        await self._bell.open(self._channel)

    async def close(self) -> None:
        """Idempotent."""
        await self._bell.close()

    async def calls(self) -> AsyncIterator[Call]:
        """One's own too. Never ends by itself."""
        async for payload in self._bell:
            if payload is RECONNECTED:
                continue
            call = parse_call(payload)
            if call is None:
                self._broker.malformed += 1
            else:
                yield call

    async def call(self, call: Call) -> None:
        """Once to all that listen now."""
        await self._broker.call("PUBLISH", self._channel, call.encode())

    async def unread(self, worker: str, incarnation: str) -> tuple[int, Load]:
        """How many jobs of its stream a worker has not read, and what it is charged. One round trip."""
        keys = self._broker.keys
        stream = keys.jobs(worker)
        length, summary, load = await self._broker.pipeline(
            [
                ("XLEN", stream),
                ("XPENDING", stream, GROUP),
                ("HMGET", keys.load(worker, incarnation), *LOAD_FIELDS),
            ]
        )
        # Errors are a stream without a group (nothing pending), or a key of another type (nothing to tell).
        length = 0 if isinstance(length, BrokerError) else length
        pending = 0 if isinstance(summary, BrokerError) else int(summary["pending"])
        return max(0, length - pending), Load() if isinstance(load, BrokerError) else parse_load(load)
