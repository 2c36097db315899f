"""What is sent of a trace, to a collector on a real socket."""

from __future__ import annotations

import sys
import time

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from kvstore import tracing as module
from kvstore.tracing import UNTRACED, TracingUnavailable, tracing
from tests.support.collector import attributes, collecting

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


async def test_a_trace_and_its_parts_in_two_processes() -> None:
    now, wall = time.monotonic(), time.time()
    with collecting() as collector:
        gateway = tracing(collector.url, role="gateway", incarnation="g1")
        worker = tracing(collector.url, role="worker", incarnation="i1", worker="w0")
        asked = gateway.begin("octavo.request", now, CALLER, serves=True)
        asked.part("check", now, now + 0.25)
        run = worker.begin("octavo.run", now + 0.5, asked.parent)
        run.part("decode", now + 1, now + 2)
        run.end("error", now + 2, failed=True)
        asked.tell(request_id="r1", prompt_tokens=7)
        asked.end("stop", now + 3)
        await gateway.close()
        await worker.close()
    spans = {span.name: (service, span) for service, span in collector.spans}
    assert {name: service for name, (service, _) in spans.items()} == {
        "octavo.request": "octavo-gateway",
        "check": "octavo-gateway",
        "octavo.run": "octavo-worker",
        "decode": "octavo-worker",
    }
    of = {name: span for name, (_, span) in spans.items()}
    assert {span.trace_id.hex() for span in of.values()} == {CALLER.split("-")[1]}
    assert of["octavo.request"].parent_span_id.hex() == CALLER.split("-")[2]
    assert of["check"].parent_span_id == of["octavo.run"].parent_span_id == of["octavo.request"].span_id
    assert of["decode"].parent_span_id == of["octavo.run"].span_id
    assert attributes(of["octavo.request"]) == {"request_id": "r1", "prompt_tokens": 7, "outcome": "stop"}
    assert (of["octavo.request"].status.code, of["octavo.run"].status.code) == (0, 2)
    assert (of["octavo.request"].kind, of["octavo.run"].kind) == (2, 5)  # server, consumer
    began, ended = of["decode"].start_time_unix_nano / 1e9, of["decode"].end_time_unix_nano / 1e9
    assert (began, ended - began) == (pytest.approx(wall + 1, abs=0.2), pytest.approx(1.0, abs=1e-6))


async def test_what_is_no_context_begins_a_trace_of_its_own() -> None:
    with collecting() as collector:
        gateway = tracing(collector.url, role="gateway", incarnation="g1")
        for parent in ("", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
            gateway.begin("octavo.request", 0.0, parent).end("stop", 1.0)
        await gateway.close()
    assert len({span.trace_id for _, span in collector.spans}) == 3
    assert {span.parent_span_id for _, span in collector.spans} == {b""}


async def test_a_caller_who_samples_nothing_is_heard() -> None:
    with collecting() as collector:
        gateway = tracing(collector.url, role="gateway", incarnation="g1")
        trace = gateway.begin("octavo.request", 0.0, UNSAMPLED)
        assert (trace.parent.split("-")[1], trace.parent[-2:]) == (UNSAMPLED.split("-")[1], "00")
        trace.part("check", 0.0, 1.0)
        trace.end("stop", 1.0)
        await gateway.close()
    assert collector.spans == []


async def test_a_collector_that_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.1)
    with collecting() as collector:
        collector.silent.set()
        gateway = tracing(collector.url, role="gateway", incarnation="g1")
        gateway.begin("octavo.request", 0.0).end("stop", 1.0)
        began = time.monotonic()
        await gateway.close()
        assert time.monotonic() - began < 1.5


def test_nothing_is_traced_unless_asked_for() -> None:
    off = tracing("", role="gateway", incarnation="g1")
    assert off is UNTRACED
    trace = off.begin("octavo.request", 0.0, CALLER)
    assert trace.parent == ""


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "grpc://there:4317"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(TracingUnavailable, match=r"^--otlp takes a URL such as http://127\.0\.0\.1:4317"):
        tracing(url, role="gateway", incarnation="g1")


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(TracingUnavailable, match="needs the packages opentelemetry-sdk and"):
        tracing("http://127.0.0.1:4317", role="gateway", incarnation="g1")
