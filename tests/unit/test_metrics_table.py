"""The metrics in docs/operating.md are what the processes export: every family, with its labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gateway.metrics import Call, Metrics
from gateway.prefixes import Index
from kvstore.ledger import Ledger
from kvstore.parts import Parts
from kvstore.queues import QueueInfo
from worker.metrics import WorkerMetrics
from worker.page_metrics import PageMetrics
from worker.scheduling.ages import Ages

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs/operating.md"
TABLE = PAGE.read_text().partition("## Metrics")[2].partition("\n## ")[0]
OF_THE_LIBRARY = {"le", "quantile"}
BOTH = {"octavo_part_seconds", "octavo_broker_seconds"}


def promised() -> dict[str, dict[str, set[str]]]:
    """By the table's sections: families and their labels."""
    sections: dict[str, dict[str, set[str]]] = {}
    for line in TABLE.splitlines():
        if (heading := re.match(r"\| ([a-z ]+) \| \|$", line)) is not None:
            section = sections.setdefault(heading[1], {})
        for name, labels in re.findall(r"`(octavo_[a-z_]+)(?:\{([a-z_,]+)\})?`", line.split(" | ")[0]):
            section[name] = set(labels.split(",")) - {""}
    return sections


def exported(registry: CollectorRegistry) -> dict[str, set[str]]:
    """The same of a registry, once each family has a series."""
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        if family.name.startswith("octavo_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert family.samples, f"{name} has no series here"
            found[name] = {label for sample in family.samples for label in sample.labels} - OF_THE_LIBRARY
    return found


def spent() -> Parts:
    parts = Parts()
    parts.add("submit", 0.1)
    return parts


def gateway() -> CollectorRegistry:
    metrics = Metrics()
    metrics.watch_broker(spent())
    metrics.watch_door(lambda: 0)
    metrics.watch_breaker(lambda: 0)
    metrics.watch_index(lambda: Index.EXACT)
    metrics.watch_relay(lambda: 0, lambda: 0)
    metrics.watch_fleet(lambda: {"ready": 1}, lambda: True)
    metrics.queues._queues = (QueueInfo("w0", "jobs", 1, 2, 3),)
    metrics.ledger._ledger = Ledger(0, 0, 0, 0, 0, 0, 0)
    Call(metrics).end("stop")
    metrics.http_responses.labels(path="/v1/models", status="200").inc()
    return metrics.registry


def worker() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.watch_broker(spent())
    metrics.watch_blocks(Ages())
    metrics.watch_thread("loop")
    metrics.ended("stop")
    return registry


def pages() -> CollectorRegistry:
    registry = CollectorRegistry()
    PageMetrics(registry).error(OSError())
    return registry


def test_the_table_is_what_the_processes_export() -> None:
    table = promised()
    assert [*table] == ["gateway", "worker", "with pages", "both"]
    assert table["both"].keys() == BOTH
    assert exported(gateway()) == table["gateway"] | table["both"]
    assert exported(worker()) == table["worker"] | table["both"]
    assert exported(pages()) == table["with pages"]


def test_every_line_of_the_table_says_something() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    assert [row for row in rows if len(row.split(" | ")[1]) < 10] == []


def names() -> Iterator[str]:
    for section in promised().values():
        yield from section


def test_names_end_as_prometheus_wants_it() -> None:
    """Counters are totals, and times are in seconds."""
    assert [name for name in names() if re.search(r"_(ms|millis|count|sum|bucket)$", name)] == []
