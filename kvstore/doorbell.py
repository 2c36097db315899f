"""Subscription to one channel that survives lost connections and says so."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.client import Broker


class Signal(Enum):
    """What a doorbell yields besides payloads."""

    RECONNECTED = "reconnected"


RECONNECTED: Final = Signal.RECONNECTED
"""The subscription was broken and is whole again: messages may have been missed, so look at the log or the jobs."""


class Doorbell:
    """``async for payload in bell``: bytes as published, or RECONNECTED."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def open(self, channel: str) -> None:
        """Subscribes; returns once the broker has confirmed. Raises BrokerError."""
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[bytes | Literal[Signal.RECONNECTED]]:
        """Never ends by itself; cancel the task that reads, then ``close``."""
        raise NotImplementedError

    async def close(self) -> None:
        """Idempotent."""
        raise NotImplementedError
