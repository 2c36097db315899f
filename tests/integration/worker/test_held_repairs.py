"""What the prefix index shows of a worker is put right, whatever was lost or damaged."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from tests.integration.kvstore.proxy import Proxy
from tests.integration.worker.holding import PROMPT, REPAIR_S, agree, answer, matched, said, shown
from tests.integration.worker.one_worker import running_worker
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvstore.client import Broker


@asynccontextmanager
async def own_server(binary: Path, namespace: str) -> AsyncIterator[Broker]:
    """A server that may be flushed."""
    async with EmbeddedBroker(binary=binary) as server:
        broker = await connect(BrokerConfig(server.url, namespace))
        yield broker
        await broker.close()


async def test_a_flushed_server_shows_the_pool_again(
    broker_binary: Path, model_dir: Path, tmp_path: Path, namespace: str
) -> None:
    async with own_server(broker_binary, namespace) as broker, running_worker(broker, model_dir, tmp_path) as fleet:
        first = await answer(fleet, "a", PROMPT)
        held = await agree(fleet)
        await broker.call("FLUSHALL")
        assert await agree(fleet, REPAIR_S) == held
        assert len(held) == 3
        assert await matched(fleet, PROMPT) == 3
        assert await answer(fleet, "a", PROMPT) == first

        async def exact() -> bool:
            return await said(fleet) == "exact"

        await until(exact, within_s=REPAIR_S)

        async def counted() -> bool:
            return fleet.metrics.get_sample_value("octavo_index_repairs_total") == 1

        await until(counted, within_s=REPAIR_S)


@pytest.mark.parametrize("damage", ["evicted", "another type", "one less", "one more"])
async def test_a_damaged_set_is_repaired(broker: Broker, model_dir: Path, tmp_path: Path, damage: str) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await answer(fleet, "a", PROMPT)
        held = await agree(fleet)
        key = broker.keys.held("w0", fleet.worker.info.incarnation)
        if damage == "evicted":
            await broker.call("DEL", key)
        elif damage == "another type":
            await broker.call("SET", key, "nonsense")
        elif damage == "one less":
            await broker.call("SREM", key, min(held))
        else:
            await broker.call("SADD", key, b"phantom of 16 b.")

        async def repaired() -> bool:
            return await broker.call("TYPE", key) == b"set" and await shown(fleet) == held

        await until(repaired, within_s=REPAIR_S)
        assert 0 < await broker.call("PTTL", key) <= 12_000
        await answer(fleet, "b", [1, *PROMPT])
        assert len(await agree(fleet)) == 6


async def test_a_phantom_that_the_number_hides_is_found(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.heartbeat.AUDIT_S", 0.2)
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await answer(fleet, "a", PROMPT)
        held = await agree(fleet)
        key = broker.keys.held("w0", fleet.worker.info.incarnation)
        await broker.call("SMOVE", key, key + ":gone", min(held))
        await broker.call("DEL", key + ":gone")
        await broker.call("SADD", key, b"phantom of 16 b.")
        assert await agree(fleet, REPAIR_S) == held


async def test_commits_whose_reply_is_lost_leave_no_phantom(
    broker: Broker, model_dir: Path, tmp_path: Path, namespace: str
) -> None:
    async with Proxy(broker.config.url) as proxy:
        through = await connect(BrokerConfig(proxy.url, namespace))
        async with running_worker(through, model_dir, tmp_path, kv_tokens=256) as fleet:
            for index in range(6):
                proxy.lose = through._scripts["commit"].sha1.encode()
                await answer(fleet, f"r{index}", [7 + index, *PROMPT], 40)
            assert proxy.lost == 6
            await agree(fleet)
            assert fleet.metrics.get_sample_value("octavo_evictions_total")
            assert fleet.metrics.get_sample_value("octavo_index_repairs_total") == 0
        await through.close()


async def test_a_restart_under_the_same_name_shows_nothing_of_the_life_before(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(_: object, *, goodbye: bool) -> None:
        """Killed: it says goodbye to nobody."""

    async with running_worker(broker, model_dir, tmp_path, ends_with=asyncio.CancelledError) as fleet:
        await answer(fleet, "a", PROMPT)
        await agree(fleet)
        assert await matched(fleet, PROMPT) == 3
        old = fleet.worker.info.incarnation
        with monkeypatch.context() as patched:
            patched.setattr("worker.heartbeat.Heartbeat.leave", dies)
            fleet.running.cancel()
            await asyncio.wait([fleet.running])
    assert await broker.call("SCARD", broker.keys.held("w0", old)) == 3
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        assert fleet.worker.info.incarnation != old
        assert await matched(fleet, PROMPT) == 0
        await answer(fleet, "b", PROMPT)
        assert (await fleet.ended("b"))[0].route.cached_tokens == 0
        await agree(fleet)
        assert await matched(fleet, PROMPT) == 3
