"""What a gateway shows Prometheus of things that others keep: read at each scrape, or as last read from the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client import Metric

    from kvstore.jobs import Jobs, QueueInfo
    from kvstore.ledger import Ledger


class QueueGauges(Collector):
    """Depth and age of the workers' queues as last read. Workers that are gone leave no series behind."""

    def __init__(self) -> None:
        self._queues: Sequence[QueueInfo] = ()

    async def refresh(self, jobs: Jobs) -> None:
        """Reads the queues. When the broker does not answer there is nothing to show, and nothing is shown."""
        queues: Sequence[QueueInfo] = ()
        try:
            queues = await jobs.queues()
        finally:
            self._queues = queues

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape, in the endpoint's thread."""
        depth = GaugeMetricFamily(
            "octavo_queue_depth", "Jobs in a worker's queue that have not ended.", labels=("worker", "state")
        )
        oldest = GaugeMetricFamily(
            "octavo_queue_oldest_seconds", "Age of the oldest job in a worker's queue.", labels=("worker",)
        )
        for queue in self._queues:
            depth.add_metric((queue.worker, "undelivered"), queue.undelivered)
            depth.add_metric((queue.worker, "pending"), queue.pending)
            oldest.add_metric((queue.worker,), queue.oldest_age_ms / 1000)
        return depth, oldest


class LedgerGauges(Collector):
    """The ledger as last read: gauges and no counters, as it is the broker's, and goes with the broker's data."""

    def __init__(self) -> None:
        self._ledger: Ledger | None = None

    async def refresh(self, jobs: Jobs) -> None:
        """Reads the ledger; as for queues, nothing is shown while the broker does not answer."""
        found: Ledger | None = None
        try:
            found = await jobs.ledger()
        finally:
            self._ledger = found

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape, in the endpoint's thread."""
        counted = GaugeMetricFamily(
            "octavo_ledger_jobs", "Jobs that were ever accepted, and what became of them.", labels=("state",)
        )
        missing = GaugeMetricFamily(
            "octavo_ledger_missing_jobs", "Accepted jobs that are nowhere; below 0, jobs that ended twice."
        )
        found = self._ledger
        if found is not None:
            for state in ("accepted", "finished", "failed", "cancelled", "expired", "dead", "in_flight"):
                counted.add_metric((state,), getattr(found, state))
            missing.add_metric((), found.missing)
        return counted, missing


class Gauges(Collector):
    """Numbers by one label, or a single one under an empty label."""

    def __init__(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._text, self._label = name, text, label
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape, in the endpoint's thread."""
        family = GaugeMetricFamily(self._name, self._text, labels=(self._label,) if self._label else ())
        for value, number in self._read().items():
            family.add_metric((value,) if self._label else (), float(number))
        return (family,)


class Count(Collector):
    """A number that only grows."""

    def __init__(self, name: str, text: str, read: Callable[[], int]) -> None:
        self._name, self._text = name, text
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape, in the endpoint's thread."""
        family = CounterMetricFamily(self._name, self._text)
        family.add_metric((), self._read())
        return (family,)
