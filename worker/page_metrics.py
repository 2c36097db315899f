"""Prometheus metrics of pages: what goes out, what comes back, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge

from kvstore.page import Fault

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

EVENTS: Final = ("stored", "renewed", "dropped", "refused", "fetched", "adopted", "doubted", "heads")
"""Stored: written to the store. Renewed: it was there already. Dropped: given up by the pool, and not stored. Refused:
by a store without room. Fetched: read and found sound. Adopted: offered by the pool, by then. Doubted: deleted. Heads:
read for the store, though not given up by the pool, as pages that were stored continue them."""
ABSENT: Final = "absent"
LATE: Final = "late"
UNREACHABLE: Final = "unreachable"
MISSES: Final = (ABSENT, LATE, UNREACHABLE, *(fault.value for fault in Fault))
"""Why a page that was looked for was not used: not there, not there in time, no store, or not the page it should be."""


class PageMetrics:
    """What one worker counts of its pages."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pages = Counter("octavo_pages", "Pages by what became of them", ["event"], registry=registry)
        self._misses = Counter("octavo_pages_misses", "Looks in vain, by reason", ["reason"], registry=registry)
        self._errors = Counter("octavo_pages_errors", "Calls of the store that failed", ["error"], registry=registry)
        self._bytes = Counter("octavo_pages_bytes", "Bytes of pages, by direction", ["direction"], registry=registry)
        self.buffer = Gauge("octavo_pages_buffer_bytes", "Bytes that wait to be stored", registry=registry)
        self.stored = Gauge("octavo_pages_store_pages", "Pages in the store, of all models", registry=registry)
        self.stored_bytes = Gauge("octavo_pages_store_bytes", "Bytes of them", registry=registry)
        self.fetch_tok_s = Gauge(
            "octavo_pages_fetch_tokens_per_second", "Speed of fetching; 0: nothing was fetched yet", registry=registry
        )
        self.least_tokens = Gauge(
            "octavo_pages_break_even_tokens", "From so many tokens on fetching beats computing", registry=registry
        )
        for event in EVENTS:
            self._pages.labels(event)
        for reason in MISSES:
            self._misses.labels(reason)
        for direction in ("out", "in"):
            self._bytes.labels(direction)

    def pages(self, event: str, count: int = 1) -> None:
        """One of EVENTS happened."""
        self._pages.labels(event).inc(count)

    def miss(self, reason: str) -> None:
        """For one of MISSES."""
        self._misses.labels(reason).inc()

    def error(self, error: Exception) -> None:
        """A call of the store failed."""
        self._errors.labels(type(error).__name__).inc()

    def moved(self, direction: str, count: int) -> None:
        """So many bytes went ``out`` or came ``in``."""
        self._bytes.labels(direction).inc(count)
