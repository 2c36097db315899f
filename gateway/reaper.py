"""What a gateway does for the fleet at regular times: its own lease, and a new worker for the jobs of dead ones."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from gateway.tasks import SKIPPED, Turn
from kvstore.errors import BrokerUnreachable
from kvstore.orphans import Rehomed
from kvstore.registry import HEARTBEAT_S, LEASE_TTL_MS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.rehoming import Rehoming
    from kvstore.registry import Registry

logger = logging.getLogger(__name__)

REAP_S: Final = 0.25
"""With a lease of 3 s, the jobs of a dead worker are in another one's stream some 3.5 s after its last heartbeat."""
LEASE_S: Final = LEASE_TTL_MS / 1000
OUTAGE_S: Final = 2 * HEARTBEAT_S
"""From here on a time without the broker may have cost others their leases."""
NEWS: Final = (Rehomed.MOVED, Rehomed.ENDED, Rehomed.DEAD)
"""What is worth a line in the log; a job that waits is met in every round."""


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
    def held(self) -> bool:
        """Whether it stands, for all that is known."""
        return self._clock() - self._renewed < LEASE_S

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
            held = self.held
            if held is not self._held:
                self._held = held
                await self._on_change(held)


class Reaper:
    """Finds new workers for the jobs of those that have died or left. Every gateway has one; they do not get in each
    other's way.

    Not while, or soon after, the broker was away: leases lapse then of workers that are alive and well.
    """

    def __init__(self, rehoming: Rehoming, lease: Lease, count: Callable[[Rehomed, int], None]) -> None:
        """`count`: is told how many jobs went which way."""
        self._rehoming = rehoming
        self._lease = lease
        self._count = count

    async def reap(self) -> Turn | None:
        """One round; SKIPPED while leases are not to be trusted. Raises BrokerError; what was done is counted."""
        if not self._lease.steady:
            return SKIPPED
        done: Counter[Rehomed] = Counter()
        try:
            # A round that an outage interrupts must not go on after it with what it has seen before.
            async with asyncio.timeout(OUTAGE_S):
                await self._rehoming.run(done)
        except TimeoutError as error:
            raise BrokerUnreachable("no answer while looking for dead workers") from error
        finally:
            self._tell(done)
        return None

    def _tell(self, done: Counter[Rehomed]) -> None:
        for outcome, number in done.items():
            self._count(outcome, number)
        told = {outcome.value: number for outcome, number in done.items() if outcome in NEWS}
        if told:
            logger.warning("jobs of workers that are gone: %s", told)
