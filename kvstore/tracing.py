"""Traces of requests for OpenTelemetry: one for each, over gateway, broker and worker. Off unless asked for.

A part of the work is told when it is over, with its times on the monotonic clock: so nothing is held open meanwhile,
and the work needs no context. What goes on in another process carries its ``parent``, as W3C's traceparent has it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvstore.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

CLOSE_S: Final = 2.0
"""How long a process that ends waits for the collector to take what is left."""
CALL_S: Final = 2
"""How long one call of the collector may take."""
_HEADER: Final = "traceparent"


class TracingUnavailable(KvError):  # noqa: N818 - reads as a fact
    """Traces were asked for and can't be sent."""


class Trace(Protocol):
    """What one process does for one request. Times are of the monotonic clock, in seconds."""

    @property
    def parent(self) -> str:
        """For who goes on with the request elsewhere; empty: it is not traced."""

    def tell(self, **attributes: str | int) -> None:
        """Something about the whole."""

    def part(self, name: str, began: float, ended: float) -> None:
        """A part of the work is done."""

    def end(self, outcome: str, ended: float, *, failed: bool = False) -> None:
        """All of it is. Nothing may be told afterwards."""


class Tracing(Protocol):
    """One process's traces."""

    def begin(self, name: str, began: float, parent: str = "", *, serves: bool = False) -> Trace:
        """Work for a request. ``parent``: from where the request came; what does not parse begins a new trace.
        ``serves``: somebody waits for an answer."""

    async def close(self) -> None:
        """Sends what is left, for CLOSE_S at most."""


class Untraced:
    """Both, for who traces nothing."""

    parent: Final = ""

    def begin(self, name: str, began: float, parent: str = "", *, serves: bool = False) -> Trace:
        return self

    def tell(self, **attributes: str | int) -> None:
        return

    def part(self, name: str, began: float, ended: float) -> None:
        return

    def end(self, outcome: str, ended: float, *, failed: bool = False) -> None:
        return

    async def close(self) -> None:
        return


UNTRACED: Final = Untraced()


def tracing(url: str, **process: str) -> Tracing:
    """To the collector at this URL, by OTLP over gRPC; UNTRACED where it is empty. ``process``: role, incarnation and
    the like, of all that is sent. Raises TracingUnavailable."""
    if not url:
        return UNTRACED
    if not url.startswith(("http://", "https://")):
        raise TracingUnavailable("--otlp takes a URL such as http://127.0.0.1:4317, of a collector that speaks gRPC")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        packages = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc"
        raise TracingUnavailable(f"--otlp needs the packages {packages}, which are not installed") from error
    return Otlp(OTLPSpanExporter(endpoint=url, timeout=CALL_S), **process)


class Otlp:
    """Spans, sent in batches by a thread of the library."""

    def __init__(self, exporter: SpanExporter, **process: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {f"octavo.{name}": value for name, value in process.items()}
        about = {"service.name": f"octavo-{process['role']}", "service.instance.id": process["incarnation"], **named}
        self._exporter = exporter
        self._provider: TracerProvider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")
        # One offset for all times, so that a step of the system's clock turns no part's order around.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, name: str, began: float, parent: str = "", *, serves: bool = False) -> Trace:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({_HEADER: parent}) if parent else None
        kind = SpanKind.SERVER if serves else SpanKind.CONSUMER
        return OtlpTrace(
            self._tracer.start_span(name, context, kind, start_time=self._ns(began)), self._tracer, self._ns
        )

    async def close(self) -> None:
        # Its own thread, for whose end nobody waits: the library gives an absent collector half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()

    def _ns(self, at: float) -> int:
        return int(1e9 * at) + self._offset_ns


class OtlpTrace:
    """A span and its parts."""

    def __init__(self, span: Span, tracer: Any, ns: Callable[[float], int]) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._span, self._tracer, self._ns = span, tracer, ns
        self._within = set_span_in_context(span)
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._within)
        self.parent = carrier.get(_HEADER, "")

    def tell(self, **attributes: str | int) -> None:
        self._span.set_attributes({f"octavo.{name}": value for name, value in attributes.items()})

    def part(self, name: str, began: float, ended: float) -> None:
        span = self._tracer.start_span(name, self._within, start_time=self._ns(began))
        span.end(self._ns(max(began, ended)))

    def end(self, outcome: str, ended: float, *, failed: bool = False) -> None:
        from opentelemetry.trace import StatusCode

        self.tell(outcome=outcome)
        if failed:
            self._span.set_status(StatusCode.ERROR, outcome)
        self._span.end(self._ns(ended))
