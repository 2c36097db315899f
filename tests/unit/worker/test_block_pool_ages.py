"""How old blocks become: what is counted, from when to when. The time is the test's."""

from __future__ import annotations

from itertools import accumulate

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.worker.blocks import BS, counts, fill, match, tokens
from tests.unit.worker.engine_run import engine_of, prompt_of, request, run
from worker.metrics import WorkerMetrics
from worker.scheduling.ages import BOUNDS_S, Spread
from worker.scheduling.block_pool import BlockPool


def told(spread: Spread) -> tuple[int, float]:
    """How many, and all their seconds."""
    return sum(spread.counts), spread.seconds


def test_what_is_at_most_a_bound_counts_under_it() -> None:
    spread = Spread()
    for seconds in (0.0, 0.1, 0.11, 14400.0, 14400.1):
        spread.add(seconds)
    assert spread.counts == [2, 1, *[0] * (len(BOUNDS_S) - 3), 1, 1]
    assert spread.seconds == pytest.approx(28800.31)
    assert [*BOUNDS_S] == sorted(BOUNDS_S)


def test_a_block_lives_from_its_offer_and_idles_from_its_last_user_on() -> None:
    pool = BlockPool(3, BS)
    pool.ages.now = 100.0
    table = fill(pool, tokens(1))
    pool.ages.now = 104.0
    pool.free(table)
    pool.ages.now = 110.0
    hits = match(pool, tokens(1))
    pool.share(hits)
    pool.share(hits)  # it is in use already: nobody waited
    assert (told(pool.ages.gap), told(pool.ages.life), told(pool.ages.idle)) == ((1, 6.0), (0, 0.0), (0, 0.0))
    pool.free(hits)
    pool.ages.now = 111.0
    pool.free(hits)
    pool.ages.now = 131.0
    assert pool.allocate(3) is not None
    assert pool.evictions == 1
    assert (told(pool.ages.gap), told(pool.ages.life), told(pool.ages.idle)) == ((1, 6.0), (1, 31.0), (1, 20.0))


def test_what_was_never_offered_and_what_is_forgotten_has_no_age() -> None:
    pool = BlockPool(4, BS)
    pool.free(pool.allocate(2) or [])
    table = fill(pool, tokens(1, 2))
    pool.free(table)
    pool.ages.now = 5.0
    pool.forget(table)
    assert counts(pool) == (4, 0, 0)
    assert pool.allocate(4) is not None
    pool.clear()
    assert [told(each) for each in (pool.ages.life, pool.ages.idle, pool.ages.gap)] == [(0, 0.0)] * 3


def test_blocks_over_the_caches_limit_have_idled_no_time() -> None:
    pool = BlockPool(4, BS, cache_blocks=1)
    table = fill(pool, tokens(1, 2))
    pool.ages.now = 3.0
    pool.free(table)
    assert (told(pool.ages.life), told(pool.ages.idle)) == ((1, 3.0), (1, 0.0))


def test_prometheus_gets_cumulative_buckets() -> None:
    engine, _ = engine_of(num_blocks=4)
    registry = CollectorRegistry()
    WorkerMetrics(registry).watch_blocks(engine.ages)
    for at, seed in ((1.0, 1), (3.5, 1), (4.0, 2)):
        engine.ages.now = at
        run(engine, request("a", prompt_of(13, seed=seed), max_tokens=1))
    page = generate_latest(registry).decode()
    for name, spread in (("life", engine.ages.life), ("idle", engine.ages.idle), ("reuse", engine.ages.gap)):
        count, seconds = told(spread)
        assert count > 0, name
        family = f"octavo_block_{name}_seconds"
        shown = [registry.get_sample_value(f"{family}_bucket", {"le": str(bound)}) for bound in (*BOUNDS_S, "+Inf")]
        assert shown == list(accumulate(spread.counts))
        assert registry.get_sample_value(f"{family}_count") == count
        assert registry.get_sample_value(f"{family}_sum") == seconds
        assert f"# TYPE {family} histogram" in page
    assert told(engine.ages.gap) == (3, 7.5)
