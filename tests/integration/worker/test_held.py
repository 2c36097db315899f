"""What the prefix index shows of a worker is what its pool offers, whatever happens to either."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from kvstore.registry import Registry
from tests.integration.worker.holding import PROMPT, REPAIR_S, agree, answer, matched, said
from tests.integration.worker.one_worker import running_worker
from tests.support.waiting import until
from worker import fetch
from worker.break_even import BreakEven
from worker.config import PagesConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.client import Broker
    from worker.step import StepRow


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
