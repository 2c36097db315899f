"""Pages of metrics, as workers and gateways make them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from bench.chaos.remains import HITS, QUERIES
from bench.chaos.snapshot import IDLE_GAUGES, parse_scrape
from gateway.metrics import Metrics
from worker.metrics import WorkerMetrics


def test_a_workers_page() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.ended("stop")
    metrics.sequences.labels("running").set(2)
    metrics.prefix_tokens.labels("queried").inc(7)
    found = parse_scrape(generate_latest(registry).decode())
    assert found.gauges == {
        'octavo_worker_sequences{state="running"}': 2.0,
        'octavo_worker_sequences{state="waiting"}': 0.0,
    }
    assert found.counters['octavo_jobs_total{outcome="stop"}'] == 1.0
    assert (found.counters[QUERIES], found.counters[HITS]) == (7.0, 0.0)
    assert not [name for name in found.counters if "_created" in name or "_bucket" in name]


def test_a_gateways_page() -> None:
    metrics = Metrics()
    metrics.streams.inc()
    metrics.requests.labels(model="m", outcome="stop").inc()
    found = parse_scrape(generate_latest(metrics.registry).decode())
    assert found.gauges == {"octavo_streams": 1.0}
    assert found.counters['octavo_requests_total{model="m",outcome="stop"}'] == 1.0
    assert "octavo_streams" in IDLE_GAUGES
