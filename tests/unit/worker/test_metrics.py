"""What a worker counts."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from kvstore.block_hash import root
from kvstore.parts import Parts
from tests.support.waiting import until
from tests.unit.worker.engine_run import engine_of, prompt_of, request, run
from worker.metrics import WorkerMetrics
from worker.scheduling.block import Event, EventKind

HASH = root("model", 16, "")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_gauges_are_the_engines_figures_and_counters_follow_its_totals(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry)
    engine, _ = engine_of()
    for _ in range(2):
        run(engine, request("a", prompt_of(9)))
        metrics.engine(engine.stats())
    stats = engine.stats()
    assert registry.get_sample_value("octavo_pool_blocks", {"state": "cached"}) == stats.blocks_cached == 4
    assert registry.get_sample_value("octavo_prefix_tokens_total", {"result": "queried"}) == 18
    assert registry.get_sample_value("octavo_prefix_tokens_total", {"result": "hit"}) == 8
    metrics.engine(replace(stats, preemptions=3, displacements=1))
    metrics.engine(replace(stats, preemptions=5, displacements=2))
    # Two prompts of nine tokens, eight of them found the second time; each answer's first token comes with its prompt.
    assert registry.get_sample_value("octavo_computed_tokens_total") == stats.computed_tokens
    assert registry.get_sample_value("octavo_output_tokens_total") == stats.output_tokens
    assert stats.computed_tokens == 9 + 1 + stats.output_tokens - 2
    assert registry.get_sample_value("octavo_preemptions_total") == 5
    assert registry.get_sample_value("octavo_displacements_total") == 2


def test_events_of_the_pool_are_counted_by_kind(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry)
    stored, evicted = Event(EventKind.STORED, HASH), Event(EventKind.EVICTED, HASH)
    metrics.events([stored, stored, evicted])
    metrics.events([])
    metrics.events([stored, Event(EventKind.CLEARED)])
    counted = {kind: registry.get_sample_value("octavo_pool_events_total", {"kind": kind.value}) for kind in EventKind}
    assert counted == {EventKind.STORED: 3, EventKind.EVICTED: 1, EventKind.CLEARED: 1}


def test_a_step_is_measured(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry)
    engine, _ = engine_of()
    engine.add(request("a", prompt_of(9), n=2, max_tokens=1))
    metrics.step(engine.step().stats, 0.5)
    assert registry.get_sample_value("octavo_step_seconds_sum") == 0.5
    assert registry.get_sample_value("octavo_step_tokens_sum") == 9
    assert registry.get_sample_value("octavo_step_sequences_sum") == 1


def test_parts_of_the_shells_work_and_the_broker_are_shown(registry: CollectorRegistry) -> None:
    metrics, spent = WorkerMetrics(registry), Parts()
    metrics.watch_broker(spent)
    spent.add("commit", 0.25)
    metrics.parts.add("take", 0.5)
    metrics.parts.add("take", 0.5)
    assert registry.get_sample_value("octavo_broker_seconds_count", {"call": "commit"}) == 1
    assert registry.get_sample_value("octavo_part_seconds_sum", {"part": "take"}) == 1.0
    assert registry.get_sample_value("octavo_part_seconds_count", {"part": "wait"}) == 0


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="this system has no clocks of threads")
async def test_a_threads_own_time_is_shown_and_no_longer_once_it_has_ended(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry)
    worked, end = threading.Event(), threading.Event()

    def work() -> None:
        metrics.watch_thread("engine")
        while time.thread_time() < 0.05:
            pass
        worked.set()
        end.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    assert worked.wait(20)
    seconds = registry.get_sample_value("octavo_thread_seconds_total", {"thread": "engine"})
    assert seconds is not None
    assert 0.05 <= seconds < 5
    end.set()
    thread.join()

    async def gone() -> bool:  # a moment after it was joined, for the system
        return registry.get_sample_value("octavo_thread_seconds_total", {"thread": "engine"}) is None

    await until(gone, within_s=20)
