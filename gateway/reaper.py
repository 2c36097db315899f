"""What a gateway does for the fleet at regular times: its own lease, and an end for the jobs of dead workers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Final

from gateway.tasks import SKIPPED, Turn
from kvstore.errors import BrokerUnreachable
from kvstore.registry import HEARTBEAT_S, LEASE_TTL_MS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.jobs import Jobs
    from kvstore.registry import Registry

logger = logging.getLogger(__name__)

REAP_S: Final = 0.5
"""With a lease of 3 s, the jobs of a dead worker end within 4 s."""
LEASE_S: Final = LEASE_TTL_MS / 1000
OUTAGE_S: Final = 2 * HEARTBEAT_S
"""From here on a time without the broker may have cost others their leases."""


class Lease:
    """This gateway's lease, and what its renewals say about the broker.

    Tells when the lease may have lapsed: workers then drop this gateway's jobs, so it should get no new ones.
    """

    def __init__(
        self,
        registry: Registry,
        incarnation: str,
        on_change: Callable[[bool], Awaitable[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._incarnation = incarnation
        self._on_change = on_change
        self._clock = clock
        self._held = True
        self._renewed = clock()
        self._outage_ended = -math.inf

    @property
    def steady(self) -> bool:
        """Whether everybody alive has had the time to renew its lease: there is no outage of the broker, and the last
        one is longer ago than a lease lasts."""
        now = self._clock()
        return now - self._renewed < OUTAGE_S and now - self._outage_ended > LEASE_S

    async def renew(self) -> None:
        """One heartbeat. Raises BrokerError; `on_change` is told False when the lease must be taken for lapsed, and
        True when it is held again."""
        asked = self._clock()
        try:
            async with asyncio.timeout(LEASE_S):
                await self._registry.renew_gateway(self._incarnation)
            if self._clock() - self._renewed > OUTAGE_S:
                self._outage_ended = self._clock()
            self._renewed = asked
        except TimeoutError as error:
            raise BrokerUnreachable("no answer within the life of a lease") from error
        finally:
            held = self._clock() - self._renewed < LEASE_S
            if held is not self._held:
                self._held = held
                await self._on_change(held)


class Reaper:
    """Ends the jobs of workers that have died. Every gateway has one; they do not get in each other's way.

    Not while, or soon after, the broker was away: leases lapse then of workers that are alive and well.
    """

    def __init__(self, jobs: Jobs, lease: Lease) -> None:
        self._jobs = jobs
        self._lease = lease

    async def reap(self) -> Turn | None:
        """One round; SKIPPED while leases are not to be trusted. Raises BrokerError."""
        if not self._lease.steady:
            return SKIPPED
        try:
            # A round that an outage interrupts must not go on after it with what it has seen before.
            async with asyncio.timeout(OUTAGE_S):
                orphans = await self._jobs.end_orphans()
        except TimeoutError as error:
            raise BrokerUnreachable("no answer while looking for dead workers") from error
        if orphans:
            logger.warning("ended %d jobs of dead workers, among them %s", len(orphans), orphans[:8])
        return None
