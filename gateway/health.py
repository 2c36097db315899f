"""What the health service says, by service.

::

    ""                     this process is alive and not stopping
    octavo.v1.Fleet        and the broker answers it: it holds its lease
    octavo.v1.Inference    and at least one live worker serves a model
"""

from __future__ import annotations

from typing import Final

from grpc_health.v1 import health, health_pb2

from gateway import fleet, service

PROCESS: Final = ""


class Health:
    """Keeps the statuses in step with what the gateway learns."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self._lease_held = True
        self._served = False
        self._stopped = False

    async def begin(self) -> None:
        """The gateway answers calls from now on."""
        await self._tell()

    async def lease(self, held: bool) -> None:
        """Whether this gateway's lease stands."""
        self._lease_held = held
        await self._tell()

    async def models(self, served: bool) -> None:
        """Whether some live worker serves."""
        self._served = served
        await self._tell()

    @property
    def serves(self) -> bool:
        """Whether answers can be had: what is told of `octavo.v1.Inference`."""
        return self._lease_held and self._served and not self._stopped

    async def stop(self) -> None:
        """Nothing is served from now on, whatever is learnt later."""
        self._stopped = True
        await self.servicer.enter_graceful_shutdown()

    async def _tell(self) -> None:
        for name, serving in (
            (PROCESS, True),
            (fleet.NAME, self._lease_held),
            (service.NAME, self.serves),
        ):
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            await self.servicer.set(name, status)
