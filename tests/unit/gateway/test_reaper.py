"""When a gateway takes its lease for lapsed, and when it trusts the leases of others."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, cast

import pytest

from gateway.reaper import Lease, Reaper
from gateway.tasks import SKIPPED
from kvstore.errors import BrokerUnreachable
from kvstore.orphans import Rehomed

if TYPE_CHECKING:
    from gateway.rehoming import Rehoming
    from kvstore.registry import Registry


class Broker:
    """Answers, or does not, at the times that the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.up = True
        self.rounds = 0
        self.health: list[bool] = []
        self.done: Counter[Rehomed] = Counter()
        self.trouble: Exception | None = None
        """What interrupts a round, after that much."""
        self.counted: list[tuple[Rehomed, int]] = []

    async def renew_gateway(self, _incarnation: str) -> None:
        if not self.up:
            raise BrokerUnreachable("down")

    async def run(self, done: Counter[Rehomed]) -> None:
        self.rounds += 1
        done.update(self.done)
        if self.trouble is not None:
            raise self.trouble

    async def on_change(self, held: bool) -> None:
        self.health.append(held)

    def reaper(self, lease: Lease) -> Reaper:
        return Reaper(cast("Rehoming", self), lease, lambda *told: self.counted.append(told))

    def lease(self) -> Lease:
        return Lease(cast("Registry", self), "g", self.on_change, clock=lambda: self.now)


async def live(broker: Broker, lease: Lease, seconds: int) -> None:
    """A heartbeat every second."""
    for _ in range(seconds):
        broker.now += 1
        if broker.up:
            await lease.renew()
        else:
            with pytest.raises(BrokerUnreachable):
                await lease.renew()


async def test_health_follows_the_lease() -> None:
    broker = Broker()
    lease = broker.lease()
    await live(broker, lease, 3)
    broker.up = False
    await live(broker, lease, 2)
    assert broker.health == []
    await live(broker, lease, 3)
    assert broker.health == [False]
    broker.up = True
    await live(broker, lease, 3)
    assert broker.health == [False, True]


async def test_nobody_is_declared_dead_because_of_an_outage() -> None:
    broker = Broker()
    lease = broker.lease()
    reaper = broker.reaper(lease)
    await live(broker, lease, 1)
    await reaper.reap()
    assert broker.rounds == 1
    broker.up = False
    await live(broker, lease, 2)
    assert await reaper.reap() is SKIPPED
    broker.up = True
    await live(broker, lease, 1)
    await reaper.reap()
    await live(broker, lease, 3)
    await reaper.reap()
    assert broker.rounds == 1
    await live(broker, lease, 1)
    assert await reaper.reap() is None
    assert broker.rounds == 2


async def test_a_round_is_counted_and_what_is_new_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    reaper = broker.reaper(broker.lease())
    broker.done = Counter({Rehomed.WAITING: 7, Rehomed.STALE: 1})
    with caplog.at_level(logging.INFO):
        await reaper.reap()
        assert caplog.messages == []
        broker.done = Counter({Rehomed.MOVED: 31, Rehomed.DEAD: 1, Rehomed.WAITING: 2})
        await reaper.reap()
    assert caplog.messages == ["jobs of workers that are gone: {'moved': 31, 'dead': 1}"]
    assert broker.counted == [
        (Rehomed.WAITING, 7),
        (Rehomed.STALE, 1),
        (Rehomed.MOVED, 31),
        (Rehomed.DEAD, 1),
        (Rehomed.WAITING, 2),
    ]


@pytest.mark.parametrize("trouble", [BrokerUnreachable("down"), TimeoutError()])
async def test_what_a_round_did_before_it_was_interrupted_is_counted(trouble: Exception) -> None:
    broker = Broker()
    broker.done, broker.trouble = Counter({Rehomed.MOVED: 3}), trouble
    with pytest.raises(BrokerUnreachable):
        await broker.reaper(broker.lease()).reap()
    assert broker.counted == [(Rehomed.MOVED, 3)]


async def test_one_missed_heartbeat_is_no_outage() -> None:
    broker = Broker()
    lease = broker.lease()
    broker.up = False
    await live(broker, lease, 1)
    broker.up = True
    await live(broker, lease, 1)
    assert lease.steady
