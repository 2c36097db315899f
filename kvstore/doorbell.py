"""Subscription to one channel that survives lost connections and says so."""

from __future__ import annotations

import asyncio
import logging
import time
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

from kvstore.client import backoff_s
from kvstore.errors import BrokerUnreachable
from kvstore.translation import translated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redis.asyncio.client import PubSub

    from kvstore.client import Broker

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""After so long without any message the server is asked whether it is there; after as long again it is given up."""


class Signal(Enum):
    """What a doorbell yields besides payloads."""

    RECONNECTED = "reconnected"


RECONNECTED: Final = Signal.RECONNECTED
"""The subscription was broken and is whole again: messages may have been missed, so look at the log or the jobs."""


class Doorbell:
    """``async for payload in bell``: bytes as published, or RECONNECTED.

    One reader. Messages wait in the server while it is busy; a reader that falls behind by more than the server's
    output buffer is cut off by it, and then sees RECONNECTED.
    """

    def __init__(self, broker: Broker, *, probe_s: float = PROBE_S) -> None:
        self._broker = broker
        self._probe_s = probe_s
        # A client of its own: its connection is taken for as long as the subscription lasts.
        self._client = broker.blocking()
        self._channel = ""
        self._pubsub: PubSub | None = None

    async def open(self, channel: str) -> None:
        """Subscribes; returns once the server has confirmed, so what is published from now on is heard.

        ``channel`` is a name as ``Keys.channel`` makes it. A broker that does not answer is asked again for as long as
        ``connect`` would. Raises BrokerError.
        """
        self._channel = channel
        give_up = time.monotonic() + self._broker.config.connect_patience_s
        failures = 0
        while True:
            try:
                await self._subscribe()
            except BrokerUnreachable:
                failures += 1
                if time.monotonic() >= give_up:
                    raise
                await asyncio.sleep(backoff_s(failures))
            else:
                return

    async def __aiter__(self) -> AsyncIterator[bytes | Literal[Signal.RECONNECTED]]:
        """Never ends by itself: reconnects for as long as it takes. Raises BrokerAuth and the like."""
        failures = 0
        while True:
            try:
                pubsub = self._pubsub
                if pubsub is None:
                    pubsub = await self._subscribe()
                    logger.info("subscribed to %s again", self._channel)
                    yield RECONNECTED
                payload = await self._next(pubsub)
            except BrokerUnreachable as error:
                failures += 1
                if failures == 1:
                    logger.warning("subscription to %s lost: %s", self._channel, error)
                await self._unsubscribe()
                await asyncio.sleep(backoff_s(failures))
            else:
                failures = 0
                if payload is not None:
                    yield payload

    async def close(self) -> None:
        """Idempotent."""
        await self._unsubscribe()
        await self._client.aclose()

    async def _subscribe(self) -> PubSub:
        pubsub = self._client.pubsub()
        try:
            with translated(self._broker.config.url):
                await pubsub.subscribe(self._channel)
                confirmed = await pubsub.get_message(timeout=self._broker.config.command_timeout_s)
            if confirmed is None:
                raise BrokerUnreachable("the broker did not confirm a subscription in time")
        except BaseException:
            await _close(pubsub)
            raise
        self._pubsub = pubsub
        return pubsub

    async def _unsubscribe(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            await _close(pubsub)

    async def _next(self, pubsub: PubSub) -> bytes | None:
        """The next payload; None when something else arrived."""
        with translated(self._broker.config.url):
            message: dict[str, Any] | None = await pubsub.get_message(timeout=self._probe_s)
            if message is None:
                await pubsub.ping()
                message = await pubsub.get_message(timeout=self._probe_s)
        if message is None:
            raise BrokerUnreachable("the broker fell silent")
        return message["data"] if message["type"] == "message" else None


async def _close(pubsub: PubSub) -> None:
    await pubsub.aclose()  # type: ignore[no-untyped-call]
