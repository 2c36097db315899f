"""Prometheus metrics of a worker. One registry per process, passed in: nothing global."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from worker.step import EngineStats, StepStats

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class WorkerMetrics:
    """What one worker counts. Gauges are set from the engine's own figures, so they can't drift."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.jobs = Counter("octavo_jobs", "Jobs ended by this worker", ["outcome"], registry=registry)
        self.fenced = Counter("octavo_fenced", "Writes refused because the job had moved on", registry=registry)
        self.step_seconds = Histogram(
            "octavo_step_seconds", "Time of one step", buckets=STEP_BUCKETS, registry=registry
        )
        self.step_tokens = Histogram(
            "octavo_step_tokens", "Tokens computed in one step", buckets=SIZE_BUCKETS, registry=registry
        )
        self.step_sequences = Histogram(
            "octavo_step_sequences", "Sequences in one step", buckets=SIZE_BUCKETS, registry=registry
        )
        self.sequences = Gauge("octavo_worker_sequences", "Sequences by state", ["state"], registry=registry)
        self.blocks = Gauge("octavo_pool_blocks", "Blocks of the pool by state", ["state"], registry=registry)
        self.prefix_tokens = Counter(
            "octavo_prefix_tokens",
            "Prompt tokens looked up in the prefix cache, and found",
            ["result"],
            registry=registry,
        )
        self.evictions = Counter("octavo_evictions", "Cached blocks given up for new ones", registry=registry)
        self.preemptions = Counter("octavo_preemptions", "Sequences sent back to be recomputed", registry=registry)
        self._seen = (0, 0, 0, 0)

    def step(self, stats: StepStats, seconds: float) -> None:
        self.step_seconds.observe(seconds)
        self.step_tokens.observe(stats.tokens)
        self.step_sequences.observe(stats.sequences)

    def engine(self, stats: EngineStats) -> None:
        """Copies the engine's figures. Its totals only grow; the counters advance by the difference."""
        self.sequences.labels("running").set(stats.running)
        self.sequences.labels("waiting").set(stats.waiting)
        self.blocks.labels("free").set(stats.blocks_free)
        self.blocks.labels("cached").set(stats.blocks_cached)
        self.blocks.labels("used").set(stats.blocks_used)
        totals = (stats.prefix_queried, stats.prefix_hit, stats.evictions, stats.preemptions)
        counters = (
            self.prefix_tokens.labels("queried"),
            self.prefix_tokens.labels("hit"),
            self.evictions,
            self.preemptions,
        )
        for counter, total, seen in zip(counters, totals, self._seen, strict=True):
            counter.inc(total - seen)
        self._seen = totals
