"""The product's own client under faults: what ``gateway.client.Client`` makes of its calls, recorded as one call.

Where it calls, how often, and what it leaves out of what comes twice is its own affair: what a user sees is judged.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc.aio

from bench.chaos.history import CANCEL, MERGED, Called, Came, Ended
from bench.chaos.records import brought, ended_by
from gateway.client import BrokenStream, Client

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from bench.chaos.history import Recorder
    from octavo.v1 import inference_pb2

BROKEN: Final = "DATA_LOSS"
"""Status of what the client took for a broken promise: one that the service itself never has."""
PAUSE_S: Final = 0.1
"""Between two tries to cancel."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for. ``until``: its deadline, by ``time.monotonic``. ``cancel_at``: it is cancelled after so
    many tokens; ``leaves``: by leaving, and not by a call of its own."""

    request: inference_pb2.GenerateRequest
    until: float
    cancel_at: int | None = None
    leaves: bool = False

    @property
    def id(self) -> str:
        return self.request.request_id


class Product:
    """For each gateway a client that begins there. Made where an event loop runs."""

    def __init__(self, targets: Sequence[str], recorder: Recorder, numbers: random.Random, *, hangs_s: float) -> None:
        self._clients = [Client([*targets[first:], *targets[:first]]) for first in range(len(targets))]
        self._target = ",".join(targets)
        self._recorder = recorder
        self._numbers = numbers
        self._hangs_s = hangs_s

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def ask(self, asked: Asked) -> None:
        """One request to its end, or until its client hangs: then the call is left open in the history."""
        client, left = self._numbers.choice(self._clients), asked.until - time.monotonic()
        self._recorder.note(Called(asked.id, 0, time.monotonic(), MERGED, self._target))
        cancelling: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(left + self._hangs_s):
                ended = await self._hear(client, asked, left, cancelling)
        except TimeoutError:
            ended = None
        if ended is not None:
            self._recorder.note(ended)
        await asyncio.gather(*cancelling)

    async def _hear(self, client: Client, asked: Asked, left: float, cancelling: list[asyncio.Task[None]]) -> Ended:
        tokens = 0
        try:
            async with aclosing(client.generate(asked.request, timeout=left)) as answer:
                async for response in answer:
                    for event in brought(asked.id, 0, response):
                        self._recorder.note(event)
                        tokens += len(event.tokens) if isinstance(event, Came) else 0
                    if cancelling or asked.cancel_at is None or tokens < asked.cancel_at:
                        continue
                    if asked.leaves:
                        self._recorder.note(Called(asked.id, 1, time.monotonic(), CANCEL, self._target))
                        await answer.aclose()
                        self._recorder.note(Ended(asked.id, 1, time.monotonic(), "OK"))
                        return Ended(asked.id, 0, time.monotonic(), "CANCELLED", "its caller left")
                    cancelling.append(asyncio.create_task(self._cancel(client, asked)))
        except grpc.aio.AioRpcError as error:
            return ended_by(asked.id, 0, error)
        except BrokenStream as error:
            return Ended(asked.id, 0, time.monotonic(), BROKEN, str(error))
        return Ended(asked.id, 0, time.monotonic(), "OK")

    async def _cancel(self, client: Client, asked: Asked) -> None:
        """Until a gateway has answered, or the request's time is over."""
        number = 0
        while time.monotonic() < asked.until:
            number += 1
            self._recorder.note(Called(asked.id, number, time.monotonic(), CANCEL, self._target))
            try:
                cancelled = await client.cancel(asked.id)
            except grpc.aio.AioRpcError as error:
                self._recorder.note(ended_by(asked.id, number, error))
            else:
                self._recorder.note(Ended(asked.id, number, time.monotonic(), "OK", cancelled=cancelled))
                return
            await asyncio.sleep(PAUSE_S)
