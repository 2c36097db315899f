"""What a gateway does for the fleet at regular times: its own lease, and an end for the jobs of dead workers."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from kvstore.registry import LEASE_TTL_MS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.jobs import Jobs
    from kvstore.registry import Registry

logger = logging.getLogger(__name__)

REAP_S: Final = 0.5
"""With a lease of 3 s, the jobs of a dead worker end within 4 s."""


class Lease:
    """This gateway's lease. Tells when it may have lapsed: workers then drop its jobs, so it should get no new ones."""

    def __init__(self, registry: Registry, incarnation: str, on_change: Callable[[bool], Awaitable[None]]) -> None:
        self._registry = registry
        self._incarnation = incarnation
        self._on_change = on_change
        self._held = True
        self._renewed = time.monotonic()

    async def renew(self) -> None:
        """One heartbeat. Raises BrokerError or TimeoutError; `on_change` is told False when the lease must be
        taken for lapsed, and True when it is held again."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(LEASE_TTL_MS / 1000):
                await self._registry.renew_gateway(self._incarnation)
            self._renewed = asked
        finally:
            held = time.monotonic() - self._renewed < LEASE_TTL_MS / 1000
            if held is not self._held:
                self._held = held
                await self._on_change(held)


class Reaper:
    """Ends the jobs of workers that have died. Every gateway has one; they do not get in each other's way."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self.ended = 0
        """Jobs that this gateway has ended so far."""

    async def reap(self) -> None:
        """One round. Raises BrokerError."""
        orphans = await self._jobs.end_orphans()
        if orphans:
            self.ended += len(orphans)
            logger.warning("ended %d jobs of dead workers, among them %s", len(orphans), orphans[:8])
