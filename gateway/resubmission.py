"""Jobs that the broker has lost: they are submitted again under the same id, without a storm."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from gateway.errors import Draining, JobLost, NoWorker, Overloaded, told
from gateway.pauses import pauses
from gateway.stream import CALL_AGAIN
from kvstore.errors import BrokerError

if TYPE_CHECKING:
    from gateway.dispatch import Dispatch, Sent
    from gateway.models import Models, Served
    from gateway.output import Asked
    from gateway.relay import Relay
    from gateway.tasks import Tasks

PATIENCE_S: Final = 30.0
"""How long it is tried: workers come back to a broker that lost everything with their next heartbeat."""
SAME_KIND_S: Final = 10.0
"""How long a job with output waits for a worker of the kind that gave it: another one may go on with other bits."""
LOOK_S: Final = 0.25
"""All who wait share a look at the fleet for so long."""


class Resubmission:
    """Submits again what the broker has lost, on behalf of one gateway."""

    def __init__(self, dispatch: Dispatch, models: Models, relay: Relay, tasks: Tasks) -> None:
        self._dispatch = dispatch
        self._looks = Looks(models, tasks)
        self._relay = relay

    async def submit(self, asked: Asked) -> Sent:
        """Raises what can't be helped by waiting, JobLost after PATIENCE_S, Draining when the gateway stops."""
        began = time.monotonic()
        unknown: BrokerError | None = None
        stream = asked.stream
        begun = stream.begun
        waits = pauses()
        while True:
            try:
                order = await asked.ordered()
                order.accepted = True
                order.fingerprint = stream.fingerprint
                order.same_kind = stream.begun and time.monotonic() < began + SAME_KIND_S
                sent = await self._dispatch.submit(order, await self._looks.find(order.job.model))
            except (NoWorker, Overloaded, BrokerError) as error:
                if isinstance(error, BrokerError) and asked.offered():
                    unknown = error
                if asked.left:
                    raise unknown or error from error  # if the broker may have it, it is to be ended
                if self._relay.closed:
                    raise Draining(f"the gateway is stopping; {CALL_AGAIN}") from error
                if time.monotonic() > began + PATIENCE_S:
                    lost = "the broker has lost the job, and it can't be submitted again"
                    raise JobLost(f"{lost}: {told(error)}") from error
            else:
                if not begun:  # what its reader has is of another kind still
                    stream.fingerprint = sent.fingerprint
                return sent
            await self._relay.pause(next(waits))


class Looks:
    """Looks at the fleet that are shared by all who want one at about the same time."""

    def __init__(self, models: Models, tasks: Tasks) -> None:
        self._models = models
        self._tasks = tasks
        self._last: dict[str, tuple[float, asyncio.Task[Served]]] = {}

    async def find(self, name: str) -> Served:
        """The model of that name as it is served now, or was within LOOK_S. Raises as ``Models.find``."""
        now = time.monotonic()
        self._last = {each: last for each, last in self._last.items() if not last[1].done() or now - last[0] < LOOK_S}
        if name not in self._last:
            look = self._tasks.spawn(self._models.find(name, now=True), name=f"look for {name}", awaited=True)
            look.add_done_callback(_seen)  # those who wanted it may have left
            self._last[name] = now, look
        return await asyncio.shield(self._last[name][1])


def _seen(look: asyncio.Task[Served]) -> None:
    """Its failure is known."""
    if not look.cancelled():
        look.exception()
