"""What the prefix index shows of a worker is what its pool offers, whatever happens to either."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import chain, root
from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from kvstore.prefix_index import PrefixIndex, short
from kvstore.registry import Registry
from tests.integration.kvstore.proxy import Proxy
from tests.integration.worker.one_worker import Fleet, joined, running_worker
from tests.support.waiting import until
from worker import fetch
from worker.break_even import BreakEven
from worker.config import PagesConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from kvstore.client import Broker
    from worker.step import StepRow

REPAIR_S = 2.0
"""A worker that is free to do so has repaired its part of the index by then."""
PROMPT = list(range(5, 5 + 50))


def offered(fleet: Fleet) -> set[bytes]:
    """By the pool's own books."""
    return {short(hash_) for hash_ in fleet.worker.engine._scheduler.pool._by_hash}


async def shown(fleet: Fleet) -> set[bytes]:
    """By the index."""
    info = fleet.worker.info
    return await PrefixIndex(fleet.broker).members(info.id, info.incarnation)


async def agree(fleet: Fleet, within_s: float = 10.0) -> set[bytes]:
    """Returns once the worker is idle and the index shows just what its pool offers, and what that is."""
    await fleet.idle()

    async def same() -> bool:
        return await shown(fleet) == offered(fleet)

    await until(same, within_s=within_s)
    return offered(fleet)


async def answer(fleet: Fleet, name: str, prompt: list[int], tokens: int = 6) -> list[int]:
    await fleet.submit(name, prompt, tokens, seed=3)
    return joined(await fleet.ended(name))


async def matched(fleet: Fleet, prompt: list[int]) -> int:
    """Blocks of a prompt that the index shows for the worker that lives under its name now."""
    (info,) = await Registry(fleet.broker).workers()
    hashes = chain(root(info.fingerprint, info.block_size), prompt, info.block_size)
    return (await PrefixIndex(fleet.broker).match([info], {info.fingerprint: hashes}))[info.id].blocks


async def said(fleet: Fleet) -> str:
    """What the lease tells of the index."""
    (info,) = await Registry(fleet.broker).workers()
    return info.index


@asynccontextmanager
async def own_server(binary: Path, namespace: str) -> AsyncIterator[Broker]:
    """A server that may be flushed."""
    async with EmbeddedBroker(binary=binary) as server:
        broker = await connect(BrokerConfig(server.url, namespace))
        yield broker
        await broker.close()


async def test_the_index_shows_what_the_pool_offers(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await answer(fleet, "a", PROMPT)
        assert len(await agree(fleet)) == 3  # 55 tokens computed in blocks of 16
        assert await matched(fleet, PROMPT) == 3
        assert await matched(fleet, PROMPT[:-1] + [9] * 40) == 3
        assert await matched(fleet, PROMPT[:20] + [9] * 40) == 1
        assert await matched(fleet, [9] * 40) == 0
        log = await fleet.ended("a")
        assert log[0].route.cached_tokens == 0
        await answer(fleet, "b", PROMPT)
        assert (await fleet.ended("b"))[0].route.cached_tokens == 48
        assert await said(fleet) == "exact"
        assert fleet.metrics.get_sample_value("octavo_index_repairs_total") == 0


@pytest.mark.parametrize("cache_tokens", [None, 96])
async def test_evictions_reach_the_index(
    broker: Broker, model_dir: Path, tmp_path: Path, cache_tokens: int | None
) -> None:
    """A pool of 16 blocks, and many prompts that don't fit together."""
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=256, cache_tokens=cache_tokens) as fleet:
        for index in range(12):
            await fleet.submit(f"r{index}", [7 + index, *PROMPT], 20 + index, seed=index, n=1 + index % 3)
        for index in range(12):
            await fleet.ended(f"r{index}")
        held = await agree(fleet)
        assert 0 < len(held) <= (16 if cache_tokens is None else 6)
        assert fleet.metrics.get_sample_value("octavo_evictions_total")
        assert fleet.metrics.get_sample_value("octavo_index_repairs_total") == 0


async def test_what_a_cancelled_job_leaves_behind_is_shown_though_no_step_follows(
    broker: Broker, model_dir: Path, tmp_path: Path
) -> None:
    async with running_worker(broker, model_dir, tmp_path, cache_tokens=0) as fleet:
        await fleet.submit("long", PROMPT, 400)
        await fleet.tokens("long", 3)
        await fleet.jobs.cancel("long")
        assert await agree(fleet, REPAIR_S) == set()


async def test_a_cleared_cache_is_shown_by_nobody(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        await answer(fleet, "a", PROMPT)
        await agree(fleet)
        fleet.worker.engine._scheduler.pool.clear()  # its thread sleeps
        await answer(fleet, "b", PROMPT[:20])
        assert len(await agree(fleet)) == 1
        assert await matched(fleet, PROMPT) == 1


async def test_blocks_in_doubt_are_not_shown(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        runner = fleet.worker.engine._forward._runner
        forward = runner.forward

        def poisoned(rows: Sequence[StepRow]) -> object:
            logits = forward(rows)
            if any(99 in row.token_ids for row in rows):
                logits[:] = math.nan
            return logits

        monkeypatch.setattr(runner, "forward", poisoned)
        await answer(fleet, "sound", PROMPT)
        assert len(await agree(fleet)) == 3
        await fleet.submit("poisoned", [*PROMPT[:40], 99], 6)
        await fleet.ended("poisoned")
        # What it shared with the sound one can't be told from what it spoilt.
        assert await agree(fleet) == set()
        assert await matched(fleet, PROMPT) == 0


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


async def test_a_lease_tells_rates_that_follow_the_steps(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        (at_load,) = await Registry(broker).workers()
        assert min(at_load.prefill_tok_s, at_load.step_ms, at_load.sequence_ms) > 0
        await answer(fleet, "a", PROMPT, 100)

        async def told() -> bool:
            (now,) = await Registry(broker).workers()
            return now.step_ms not in (0, at_load.step_ms) and now.prefill_tok_s not in (0, at_load.prefill_tok_s)

        await until(told, within_s=10)


async def test_pages_that_are_taken_in_are_shown(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was evicted comes back from the store: the index follows, and the lease tells how fast."""
    monkeypatch.setattr(BreakEven, "pays", lambda *_: True)
    monkeypatch.setattr(fetch, "LEAST_LIMIT_S", 20.0)
    pages = PagesConfig(folder=str(tmp_path / "pages"))
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=256, pages=pages) as fleet:
        await answer(fleet, "a", PROMPT)
        for index in range(4):
            await answer(fleet, f"other{index}", [7 + index, *range(60, 200)])
        await agree(fleet)

        async def stored() -> bool:
            pages = fleet.metrics.get_sample_value("octavo_pages_total", {"event": "stored"}) or 0
            return await matched(fleet, PROMPT) == 0 and pages >= 10

        await until(stored, within_s=20)
        await answer(fleet, "b", PROMPT)
        assert (await fleet.ended("b"))[0].route.cached_tokens == 48
        await agree(fleet)
        assert await matched(fleet, PROMPT) == 3

        async def told() -> bool:
            (info,) = await Registry(broker).workers()
            return info.fetch_tok_s > 0

        await until(told, within_s=5)
        assert fleet.metrics.get_sample_value("octavo_index_repairs_total") == 0
