"""What an intake does about claims that the broker has lost."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from tests.integration.kvstore.proxy import Proxy
from tests.integration.worker.test_intake import World, reading
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from kvstore.client import Broker
    from kvstore.entries import Entry
    from kvstore.jobs import Claim

LONG = 4000
"""Of a prompt: four of them are all that is read."""


class Restartable:
    """A server that keeps its data, behind an address that stays."""

    def __init__(self, binary: Path, folder: Path, proxy: Proxy) -> None:
        self._options = {"dir": str(folder), "appendonly": "yes", "appendfsync": "always"}
        self._binary, self._proxy = binary, proxy
        self._server: EmbeddedBroker | None = None

    async def start(self) -> None:
        self._server = EmbeddedBroker(binary=self._binary, options=self._options)
        self._proxy.upstream = await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop()


@asynccontextmanager
async def restartable(binary: Path, folder: Path, namespace: str) -> AsyncIterator[tuple[Restartable, Broker]]:
    async with Proxy("redis://127.0.0.1:1") as proxy:
        server = Restartable(binary, folder, proxy)
        await server.start()
        broker = await connect(BrokerConfig(proxy.url, namespace, retries=8))
        try:
            yield server, broker
        finally:
            await broker.close()
            await server.stop()


async def lose_claim(broker: Broker, name: str) -> None:
    """As a server does that comes back without what it was told after the entry was read."""
    await broker.call("HSET", broker.keys.job(name), "state", "queued", "owner", "", "attempt", "0")


async def let_go(world: World) -> set[str]:
    """Drops what is over, as the loop does; returns it once there is something."""
    gone: set[str] = set()

    async def dropped() -> bool:
        claims, lost = world.intake.take()
        assert claims == []
        for name in lost:
            world.journal.drop(name)
        gone.update(lost)
        return bool(gone)

    await until(dropped, within_s=20)
    return gone


async def begin_again(world: World, name: str) -> dict[str, tuple[str, int]]:
    """What is begun until this one is, as the loop would do it: with entries and attempts."""
    begun: dict[str, tuple[str, int]] = {}

    async def has() -> bool:
        claims, lost = world.intake.take()
        for each in lost:
            world.journal.drop(each)
        for claim in claims:
            if not world.journal.holds(claim):
                world.journal.open(claim, now=0.0)
                begun[claim.job.request_id] = (claim.entry_id, claim.attempt)
        world.intake.update_room()
        return name in begun

    await until(has, within_s=20)
    return begun


async def test_a_job_whose_claim_was_lost_while_nobody_was_reading_is_claimed_again(
    broker_binary: Path, tmp_path: Path, namespace: str
) -> None:
    """There was no room, so that no read has failed."""
    names = ["r0", "r1", "r2", "r3"]
    async with (
        restartable(broker_binary, tmp_path, namespace) as (server, broker),
        reading(broker, dict.fromkeys(names, LONG)) as world,
    ):
        await world.read(names)
        assert world.intake.full.is_set()
        had = {name: (job.claim.entry_id, job.claim.attempt) for name, job in world.journal.running.items()}
        await lose_claim(broker, "r1")
        await server.stop()
        await server.start()
        assert await let_go(world) == {"r1"}
        world.intake.update_room()
        assert await begin_again(world, "r1") == {"r1": had["r1"]}
        record = await world.jobs.get("r1")
        assert record is not None
        assert (record.owner, record.attempt) == (world.info.incarnation, 1)
        # The claims of the others were repeated, and changed nothing.
        running = world.journal.running
        assert {name: (job.claim.entry_id, job.claim.attempt) for name, job in running.items()} == had


@pytest.mark.parametrize("lost", [False, True])
async def test_a_claim_that_is_older_than_the_end_of_its_job_is_asked_for_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    """It was on its way while the last delivery was committed. Only where the broker has ``lost`` that, it begins."""
    async with reading(broker, {"r1": 3}) as world:
        await world.read(["r1"])
        had, answered = world.journal.running["r1"].claim, 0
        claim = world.intake._jobs.claim

        async def claim_late(worker: str, incarnation: str, entries: Sequence[Entry]) -> list[Claim]:
            nonlocal answered
            claims = await claim(worker, incarnation, entries)
            if any(entry.entry_id == had.entry_id for entry in entries):
                answered += 1
                if answered == 1:
                    if not lost:
                        await world.end("r1")
                    world.journal.drop("r1")
                    world.intake.ended("r1", had.entry_id, had.attempt, refused=False)
            return claims

        async def answered_twice() -> bool:
            return answered == 2

        monkeypatch.setattr(world.intake._jobs, "claim", claim_late)
        world.intake.read_again()
        if lost:
            assert await begin_again(world, "r1") == {"r1": (had.entry_id, had.attempt)}
        await until(answered_twice, within_s=20)
        await world.submit("next", 3)
        assert [*await begin_again(world, "next")] == ["next"]


async def test_what_is_over_is_not_claimed_again(broker: Broker) -> None:
    """What is pending is read again, and of jobs that were ended, moved or lost nothing is."""
    names = ["ended", "moved", "gone", "kept"]
    async with reading(broker, dict.fromkeys(names, 3)) as world:
        await world.read(names)
        await world.jobs.cancel("ended")
        moved, gone = broker.keys.job("moved"), broker.keys.job("gone")
        await broker.call("HSET", moved, "worker", "w1", "entry", "1-1", "state", "queued", "owner", "")
        await broker.call("DEL", gone)
        for name in names[:3]:
            world.journal.drop(name)
        world.intake.read_again()
        await world.submit("next", 3)
        assert [*await begin_again(world, "next")] == ["next"]

        async def looked_through() -> bool:
            (queue,) = await world.jobs.queues()
            return (queue.undelivered, queue.pending) == (0, 2)

        await until(looked_through, within_s=20)
        assert {claim.job.request_id for claim in world.intake.take()[0]} <= {"kept", "next"}
        assert [*world.journal.running] == ["kept", "next"]
        # What was done by hand has left charges.
        await broker.call("DEL", moved, broker.keys.load("w0", world.info.incarnation))
