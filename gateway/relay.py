"""From the broker to the streams of this gateway: one subscription, and a Stream for every call that waits.

The subscription is only a doorbell; what it may have lost, streams find in their token logs.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from gateway.place import Delivery, Offer
from gateway.stream import SILENCE_S, Stream
from kvstore import token_log
from kvstore.doorbell import RECONNECTED, Doorbell

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kvstore.client import Broker
    from kvstore.jobs import Jobs

logger = logging.getLogger(__name__)


class Relay:
    """Owns the subscription to this gateway's channel and the streams by request id."""

    def __init__(self, broker: Broker, jobs: Jobs, incarnation: str) -> None:
        self._broker = broker
        self._jobs = jobs
        self._incarnation = incarnation
        self._channel = broker.keys.channel(incarnation)
        self._bell = Doorbell(broker)
        self._streams: dict[str, list[Stream]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.malformed = 0
        """Well-formed messages that no worker may have written. Those that do not parse: ``Broker.malformed``."""
        self.refills = 0

    @property
    def closed(self) -> bool:
        """Whether all streams are to end, because the gateway stops."""
        return self._closing.is_set()

    async def pause(self, seconds: float) -> None:
        """Waits for so long, but not beyond ``close``: what is told to a caller then must not come too late."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def start(self) -> None:
        """Subscribes, then listens in a task of its own. Raises BrokerError."""
        await self._bell.open(self._channel)
        self._task = asyncio.create_task(self._listen(), name="relay")

    async def close(self) -> None:
        """Ends every stream that is still open with Draining, and the subscription. Idempotent."""
        self._closing.set()
        self._wake_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self._bell.close()

    def open(
        self, request_id: str, choices: int, after: Mapping[int, int] | None = None, *, caller: str = ""
    ) -> Stream:
        """A stream for a job that is about to be submitted or attached to: a context manager, in the books while it is
        entered. `after`: the next token index of each choice of which the reader has tokens already. `caller`: how the
        client calls itself, if it does."""
        return Stream(self, self._broker, self._jobs, request_id, choices, after or {}, caller)

    def add(self, stream: Stream) -> None:
        """Puts a stream in the books."""
        self._streams.setdefault(stream.request_id, []).append(stream)

    def remove(self, stream: Stream) -> None:
        """Takes a stream out of the books."""
        streams = self._streams[stream.request_id]
        streams.remove(stream)
        if not streams:
            del self._streams[stream.request_id]

    def bequeath(self, request_id: str, callers: Collection[str]) -> bool:
        """Whether a stream of this gateway waits for the job, other than those of `callers`, who have left. If so it is
        the one to end the job from now on, whichever of them asked for it last."""
        for each in self._streams.get(request_id, ()):
            if each.attached and each.caller not in callers:
                each.callers.update(callers)
                return True
        return False

    async def leave(self, request_id: str, caller: str) -> str | None:
        """A caller leaves by name, which that of each of its calls begins with. Where others wait here for the same job
        it is theirs; None then, else the name under which it may be ended. Raises BrokerError."""
        while (heir := self._heir(request_id, caller)) is not None:
            await self._jobs.inherit(request_id, leaver=caller, heir=heir.caller, gateway=self._incarnation)
            if heir in self._streams.get(request_id, ()):
                return None
            caller = heir.caller  # it has left meanwhile, and could not end what was not its own
        return caller

    def _heir(self, request_id: str, caller: str) -> Stream | None:
        """The last who waits for a job, but for calls of that caller."""
        streams = reversed(self._streams.get(request_id, ()))
        return next((each for each in streams if each.attached and not each.caller.startswith(caller)), None)

    def __len__(self) -> int:
        return sum(len(streams) for streams in self._streams.values())

    async def _listen(self) -> None:
        while True:
            try:
                async for payload in self._bell:
                    if payload is RECONNECTED:
                        self._distrust_all()
                    else:
                        self.deliver(token_log.decode_or_count(self._broker, payload))
            except Exception:
                # Streams must not starve because of one message: they fall back on the log, and listening goes on.
                logger.exception("the relay stumbled")
                self._distrust_all()
                await asyncio.sleep(SILENCE_S)

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Hands deliveries to the streams that wait for them; others are not ours any more."""
        for delivery in deliveries:
            for stream in self._streams.get(delivery.request_id, ()):
                if stream.offer(delivery) is Offer.MALFORMED:
                    self.malformed += 1

    def _distrust_all(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                stream.distrust()

    def _wake_all(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                stream.wake()
