"""A collector of OpenTelemetry's traces, on a real socket: it keeps the spans that it gets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`spans` has what came, with the name of the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        self.url = ""
        self.silent = threading.Event()
        """While it is set, nothing is answered."""
        self.goes_on = threading.Event()

    def Export(self, request: Any, _context: Any) -> trace_service_pb2.ExportTraceServiceResponse:  # noqa: N802
        if self.silent.is_set():
            self.goes_on.wait(20)
        for resource in request.resource_spans:
            told = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(told["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """It runs inside; `url` says where."""
    collector = Collector()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
        collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            collector.goes_on.set()
            server.stop(None).wait()


def attributes(span: Span) -> dict[str, str | int]:
    """Those of ours, without their prefix."""
    told: dict[str, str | int] = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        told[each.key.removeprefix("octavo.")] = getattr(each.value, kind)
    return told
