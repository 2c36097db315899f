"""What this gateway measures, for Prometheus. One registry per gateway, nothing global."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from gateway.config import address
from gateway.gauges import Count, Gauges, LedgerGauges, QueueGauges
from gateway.prefixes import Index
from kvstore.orphans import Rehomed
from kvstore.parts import Parts, PartsCollector
from kvstore.tracing import UNTRACED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from gateway.rpc import Context
    from kvstore.tracing import Tracing
    from octavo.v1 import inference_pb2

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FATES: Final = (Rehomed.MOVED, Rehomed.ENDED, Rehomed.DEAD, Rehomed.STALE)
OUTCOMES: Final = ("equal", "less", "more")
CALL_PARTS: Final = ("check", "tokenize", "send", "relay")
"""Of a call that streams, one after the other: its bounds and its model, its prompt's tokens and the job, routing and
submitting it; and from each delivery that the doorbell brought to the response made of it."""
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)


FINISHES: Final = ("stop", "length", "cancelled")
"""Outcomes of calls that did not fail."""


class Metrics:
    """The instruments of one gateway, and the endpoint that shows them."""

    def __init__(self, tracing: Tracing = UNTRACED) -> None:
        """``tracing``: what is to be told of each call besides."""
        self.tracing = tracing
        self.registry = CollectorRegistry()
        self.queues = QueueGauges()
        self.registry.register(self.queues)
        self.ledger = LedgerGauges()
        self.registry.register(self.ledger)
        self._of_calls()
        self._of_caches()
        self._of_moved_jobs()
        self.parts = Parts(*CALL_PARTS)
        self.registry.register(PartsCollector("octavo_part_seconds", "Parts of calls that stream.", "part", self.parts))
        ProcessCollector(registry=self.registry)
        self._server: tuple[WSGIServer, Thread] | None = None

    def _of_calls(self) -> None:
        self.requests = Counter(
            "octavo_requests",
            "Generate and Attach calls that have ended.",
            ("model", "outcome"),
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "octavo_queue_seconds", "From submission to claim.", buckets=_SECONDS, registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "octavo_time_to_first_token_seconds",
            "From the call's arrival to its first output.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.output_token_seconds = Histogram(
            "octavo_time_per_output_token_seconds",
            "Per token of a choice after the first ones, as the gateway got them.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.http_responses = Counter(
            "octavo_http_responses",
            "Answers to HTTP requests that have begun.",
            ("path", "status"),
            registry=self.registry,
        )
        self.streams = Gauge("octavo_streams", "Generate and Attach calls that are open.", registry=self.registry)

    def _of_caches(self) -> None:
        self.predicted_tokens = Counter(
            "octavo_predicted_cached_tokens",
            "Prompt tokens that were expected in the cache of the worker that began a job.",
            registry=self.registry,
        )
        self.cached_tokens = Counter(
            "octavo_cached_tokens", "Prompt tokens that jobs found in a worker's cache.", registry=self.registry
        )
        self.predictions = Counter(
            "octavo_predictions",
            "Jobs by what they found in the cache of the worker that began them: as expected of it, less, or more.",
            ("outcome",),
            registry=self.registry,
        )
        for outcome in OUTCOMES:
            self.predictions.labels(outcome=outcome)

    def _of_moved_jobs(self) -> None:
        self.rehomed = Counter(
            "octavo_rehomed",
            "Jobs of workers that were gone, by what this gateway did: moved them to another worker, ended them as"
            " there was none, or as too many had died of them, or found them stale: done by somebody else.",
            ("outcome",),
            registry=self.registry,
        )
        for fate in FATES:
            self.rehomed.labels(outcome=fate.value)
        self.resubmitted = Counter(
            "octavo_resubmitted", "Submissions of jobs that the broker had lost.", registry=self.registry
        )

    def watch_broker(self, spent: Parts) -> None:
        """Shows what was waited for."""
        self.registry.register(PartsCollector("octavo_broker_seconds", "Calls of the broker.", "call", spent))

    def watch_breaker(self, open_circuits: Callable[[], int]) -> None:
        """Shows how many workers are kept from new jobs because they fail."""
        text = "Workers that get no jobs, or one at a time, because their last failed."
        self.registry.register(Gauges("octavo_open_circuits", text, "", lambda: {"": open_circuits()}))

    def watch_fleet(self, workers: Callable[[], Mapping[str, int]], broker_up: Callable[[], bool]) -> None:
        """Shows how many live workers there are, by state, and whether the broker answers."""
        text = "Live workers, as of the last look."
        self.registry.register(Gauges("octavo_workers", text, "state", workers))
        text = "1 while this gateway holds its lease, and so while the broker answers it."
        self.registry.register(Gauges("octavo_broker_up", text, "", lambda: {"": broker_up()}))

    def watch_door(self, refused: Callable[[], int]) -> None:
        """Shows how many calls were refused at the door."""
        text = "Calls, by gRPC or HTTP, that carried no API key that holds."
        self.registry.register(Count("octavo_unauthenticated_calls", text, refused))

    def count_rehomed(self, outcome: Rehomed, number: int) -> None:
        """So many orphans went that way. Those that wait are met again and again, and are not counted."""
        if outcome in FATES:
            self.rehomed.labels(outcome=outcome.value).inc(number)

    def watch_index(self, index: Callable[[], Index]) -> None:
        """Shows what decisions can know of prefixes."""
        text = "What the last decision could know of prefixes."

        def states() -> dict[str, bool]:
            now = index()
            return {state: state is now for state in Index}

        self.registry.register(Gauges("octavo_prefix_index", text, "state", states))

    def watch_relay(self, malformed: Callable[[], int], refills: Callable[[], int]) -> None:
        """Shows the relay's own counters."""
        for name, text, counted in (
            ("octavo_malformed_values", "Values in the broker that were none of ours.", malformed),
            ("octavo_relay_refills", "Reads of a token log on behalf of a stream.", refills),
        ):
            self.registry.register(Count(name, text, counted))

    def serve(self, host: str, port: int) -> str:
        """Starts the endpoint in a thread of its own; its HOST:PORT. Raises OSError when the port is taken."""
        self._server = start_http_server(port, addr=host, registry=self.registry)
        return address(host, self._server[0].server_port)

    async def close(self) -> None:
        """Stops the endpoint. Idempotent."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            stopped = asyncio.create_task(asyncio.to_thread(server.shutdown))
            while not stopped.done():
                # Left alone, it looks only twice a second whether it is to stop; a caller makes it look.
                with suppress(OSError):
                    await asyncio.to_thread(_call, server.server_address)
                await asyncio.wait([stopped], timeout=0.02)
            await stopped
            server.server_close()
            await asyncio.to_thread(thread.join)


def _call(server_address: Any) -> None:
    socket.create_connection(server_address[:2], timeout=1).close()


def traceparent_of(context: Context) -> str:
    """What the caller says of its trace; empty: nothing."""
    told = [value for key, value in context.invocation_metadata() or () if key == "traceparent"]
    return told[0] if told and isinstance(told[0], str) else ""


class Call:
    """The measurements of one Generate or Attach call, from its arrival."""

    def __init__(self, metrics: Metrics, context: Context | None = None) -> None:
        """``context``: of the gRPC call, which may be a part of its caller's trace."""
        self._metrics = metrics
        self._began = self._last = self._lap = time.monotonic()
        parent = "" if context is None or metrics.tracing is UNTRACED else traceparent_of(context)
        self.trace = metrics.tracing.begin("octavo.request", self._began, parent, serves=True)
        self._has_output = False
        self.model = ""
        """Set once the model is found: names that clients make up must not become time series."""
        self.replay = False
        """Set for a call that attached to a job: its times say nothing about the fleet."""
        metrics.streams.inc()

    def lap(self, part: str) -> None:
        """One of the parts is done that follow on each other from the call's arrival on."""
        now = time.monotonic()
        self._metrics.parts.add(part, now - self._lap)
        if part != "send":  # whoever routes and submits tells of its parts
            self.trace.part(part, self._lap, now)
        self._lap = now

    def output(self, tokens: int, heard: float) -> None:
        """So many tokens have come for one choice, 0 or more; of several choices, for the one that got most. ``heard``:
        when, on the monotonic clock."""
        now = time.monotonic()
        self._metrics.parts.add("relay", now - heard)
        if tokens and not self.replay:
            if self._has_output:
                self._metrics.output_token_seconds.observe((now - self._last) / tokens)
            else:
                self._metrics.first_token_seconds.observe(now - self._began)
                self.trace.part("first token", self._lap, now)
                self._lap = now
        self._has_output = self._has_output or tokens > 0
        self._last = now

    def routed(self, route: inference_pb2.Route) -> None:
        """The job's first output came with this route."""
        if self.replay:
            return
        metrics, predicted, found = self._metrics, route.predicted_cached_tokens, route.cached_tokens
        metrics.queue_seconds.observe(route.queue_ms / 1000)
        metrics.cached_tokens.inc(found)
        metrics.predicted_tokens.inc(predicted)
        outcome = "equal" if found == predicted else "less" if found < predicted else "more"
        metrics.predictions.labels(outcome=outcome).inc()

    def end(self, outcome: str) -> None:
        """The call is over. `outcome`: a finish reason or a status code, in lower case."""
        now = time.monotonic()
        if self._has_output:
            self.trace.part("relay", self._lap, now)
        self.trace.tell(model=self.model)
        self.trace.end(outcome, now, failed=outcome not in FINISHES)
        self._metrics.streams.dec()
        self._metrics.requests.labels(model=self.model, outcome=outcome).inc()
