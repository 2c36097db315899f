"""Prometheus metrics of a worker. One registry per process, passed in: nothing global."""

from __future__ import annotations

import threading
import time
from collections import Counter as Counts
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvstore.parts import Parts, PartsCollector
from kvstore.tracing import UNTRACED
from worker.scheduling.ages import BOUNDS_S
from worker.scheduling.block import EventKind
from worker.traces import Traces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import Metric

    from kvstore.tracing import Tracing
    from octavo.v1 import job_pb2
    from worker.scheduling.ages import Ages
    from worker.scheduling.block import Event
    from worker.step import EngineStats, StepStats
    from worker.stepper import Stepped

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SHELL_PARTS: Final = ("wait", "take", "record")
"""Of a job: from its claim to the step that brings its first token. Of a step: from its end until the event loop takes
its results, and making deliveries of them."""


class WorkerMetrics:
    """What one worker counts. Gauges are set from the engine's own figures, so they can't drift."""

    def __init__(self, registry: CollectorRegistry, tracing: Tracing = UNTRACED) -> None:
        self.traces = Traces(tracing)
        self._of_jobs_and_steps(registry)
        self._of_the_pool(registry)
        self._gauges = [
            *(self.sequences.labels(state) for state in ("running", "waiting")),
            *(self.blocks.labels(state) for state in ("free", "cached", "used")),
        ]
        self._counters = [
            *(self.prefix_tokens.labels(result) for result in ("queried", "hit")),
            *(self.evictions, self.preemptions, self.displacements, self.computed_tokens, self.output_tokens),
        ]
        self._seen = (0,) * len(self._counters)
        self._drifts = 0
        self.parts = Parts(*SHELL_PARTS)
        registry.register(PartsCollector("octavo_part_seconds", "Parts of the shell's work", "part", self.parts))
        self._threads = _ThreadSeconds()
        registry.register(self._threads)
        ProcessCollector(registry=registry)
        self._registry = registry

    def _of_jobs_and_steps(self, registry: CollectorRegistry) -> None:
        self.jobs = Counter("octavo_jobs", "Jobs ended by this worker", ["outcome"], registry=registry)
        self.fenced = Counter("octavo_fenced", "Writes refused because the job had moved on", registry=registry)
        self.resumed = Counter(
            "octavo_resumed",
            "Jobs that went on from their token logs: after another attempt, or a gap that the broker has left",
            ["after"],
            registry=registry,
        )
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
        self.preemptions = Counter("octavo_preemptions", "Sequences sent back to be recomputed", registry=registry)
        self.displacements = Counter(
            "octavo_displacements", "Those of the preemptions that made place for a higher priority", registry=registry
        )
        self.computed_tokens = Counter(
            "octavo_computed_tokens", "Tokens that steps computed, prompts' and recomputed ones too", registry=registry
        )
        self.output_tokens = Counter("octavo_output_tokens", "Tokens that steps gave as output", registry=registry)
        self.stolen = Counter(
            "octavo_stolen", "Jobs taken from other workers that could not read them yet", registry=registry
        )
        for after in ("attempt", "gap"):
            self.resumed.labels(after)

    def _of_the_pool(self, registry: CollectorRegistry) -> None:
        self.blocks = Gauge("octavo_pool_blocks", "Blocks of the pool by state", ["state"], registry=registry)
        self.prefix_tokens = Counter(
            "octavo_prefix_tokens",
            "Prompt tokens looked up in the prefix cache, and found",
            ["result"],
            registry=registry,
        )
        self.pool_events = Counter(
            "octavo_pool_events", "Changes in what the prefix cache offers, by kind", ["kind"], registry=registry
        )
        self.evictions = Counter(
            "octavo_evictions", "Cached blocks given up for new ones or over the limit", registry=registry
        )
        self.index_repairs = Counter(
            "octavo_index_repairs",
            "Times that the prefix index was found to differ from what the pool offers, and written anew",
            registry=registry,
        )
        for kind in EventKind:
            self.pool_events.labels(kind.value)

    def watch_broker(self, spent: Parts) -> None:
        """Shows what was waited for."""
        self._registry.register(PartsCollector("octavo_broker_seconds", "Calls of the broker", "call", spent))

    def watch_blocks(self, ages: Ages) -> None:
        """Shows how old blocks become in the pool."""
        self._registry.register(_BlockAges(ages))

    def watch_thread(self, name: str) -> None:
        """Shows the processor time of the thread that calls this, where the system tells it."""
        self._threads.add(name)

    def ended(self, outcome: str) -> None:
        self.jobs.labels(outcome).inc()

    def dropped(self, request_id: str, why: str) -> None:
        """A job goes on elsewhere, or is over."""
        self.ended(why)
        self.traces.ended(request_id, why, time.monotonic(), failed=True)

    def went_on(self, after: str) -> None:
        """A job goes on from its log: after another ``attempt`` or a ``gap``."""
        self.resumed.labels(after).inc()

    def step(self, stats: StepStats, seconds: float) -> None:
        self.step_seconds.observe(seconds)
        self.step_tokens.observe(stats.tokens)
        self.step_sequences.observe(stats.sequences)

    def taken(self, stepped: Stepped, deliveries: Sequence[job_pb2.Delivery], began: float, ended: float) -> None:
        """How long a step's results waited to be taken, at ``began``, to become deliveries until ``ended``, and what
        jobs with their first waited for that step."""
        self.parts.add("take", began - stepped.ended)
        self.parts.add("record", ended - began)
        self.traces.stepped(stepped, deliveries)
        for delivery in deliveries:
            if delivery.HasField("route"):
                self.parts.add("wait", delivery.route.prefill_ms / 1000 - (stepped.ended - stepped.began))

    def events(self, events: Iterable[Event]) -> None:
        """Counts what became of the pool's offers."""
        for kind, count in Counts(event.kind for event in events).items():
            self.pool_events.labels(kind.value).inc(count)

    def index(self, drifts: int) -> None:
        """How often the index was found to differ, in all."""
        self.index_repairs.inc(drifts - self._drifts)
        self._drifts = drifts

    def engine(self, stats: EngineStats) -> None:
        """Copies the engine's figures. Its totals only grow; the counters advance by the difference."""
        values = (stats.running, stats.waiting, stats.blocks_free, stats.blocks_cached, stats.blocks_used)
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.set(value)
        totals = (
            *(stats.prefix_queried, stats.prefix_hit, stats.evictions, stats.preemptions, stats.displacements),
            *(stats.computed_tokens, stats.output_tokens),
        )
        for counter, total, seen in zip(self._counters, totals, self._seen, strict=True):
            counter.inc(total - seen)
        self._seen = totals


class _BlockAges(Collector):
    """The pool's own figures: read when somebody asks, for nothing may hold up the thread that makes them. So one block
    may be counted already whose time is not in the sum yet."""

    def __init__(self, ages: Ages) -> None:
        self._spreads = (
            ("octavo_block_life_seconds", "From a block's being offered to its eviction", ages.life),
            ("octavo_block_idle_seconds", "From its last user's leaving a block to its eviction", ages.idle),
            ("octavo_block_reuse_seconds", "From its last user's leaving a block to its next hit", ages.gap),
        )

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape, in the endpoint's thread."""
        bounds = (*map(str, BOUNDS_S), "+Inf")
        for name, text, spread in self._spreads:
            family = HistogramMetricFamily(name, text)
            family.add_metric((), list(zip(bounds, accumulate(spread.counts), strict=True)), spread.seconds)
            yield family


class _ThreadSeconds(Collector):
    """What threads have computed for: read from the system's clocks when somebody asks."""

    def __init__(self) -> None:
        self._clocks: dict[str, int] = {}

    def add(self, name: str) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._clocks[name] = time.pthread_getcpuclockid(threading.get_ident())

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape, in the endpoint's thread."""
        family = CounterMetricFamily("octavo_thread_seconds", "Processor time of a thread", labels=("thread",))
        for name, clock in dict(self._clocks).items():
            with suppress(OSError):  # the thread has ended
                family.add_metric((name,), time.clock_gettime(clock))
        return (family,)
