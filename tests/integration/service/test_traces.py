"""One trace of a request, from its caller over a gateway and the broker to a worker, as a collector gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from kvstore.tracing import tracing
from octavo.v1.inference_pb2 import GenerateRequest, Stopping, TokenIds
from tests.integration.gateway.harness import collect, running_gateway
from tests.integration.worker.one_worker import running_worker
from tests.support.collector import attributes, collecting

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
GATEWAY = ["check", "tokenize", "route", "submit", "first token", "relay"]
WORKER = ["claim", "wait", "prefill", "decode"]


async def test_a_request_is_one_trace(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    request = GenerateRequest(
        request_id="traced",
        token_ids=TokenIds(ids=range(5, 205)),  # of more tokens than one step computes
        stopping=Stopping(max_tokens=4, ignore_eos=True),
    )
    with collecting() as collector:
        telling = tracing(collector.url, role="worker", incarnation="i", worker="w0")
        async with running_worker(broker, model_dir, tmp_path, tracing=telling) as fleet:
            async with running_gateway(broker, otlp=collector.url) as (_, _, client):
                assert await collect(client.generate(request, metadata=(("traceparent", CALLER),)))
                await fleet.idle()
            assert len(fleet.loop._metrics.traces) == 0
        await telling.close()
    spans = {span.name: span for _, span in collector.spans}
    assert len(spans) == len(collector.spans)
    assert spans.keys() == {"octavo.request", "octavo.run", *GATEWAY, *WORKER}
    assert {span.trace_id.hex() for span in spans.values()} == {CALLER.split("-")[1]}
    asked, run = spans["octavo.request"], spans["octavo.run"]
    assert asked.parent_span_id.hex() == CALLER.split("-")[2]
    assert run.parent_span_id == asked.span_id
    for whole, parts in ((asked, GATEWAY), (run, WORKER)):
        assert {spans[part].parent_span_id for part in parts} == {whole.span_id}
        told = [spans[part] for part in parts]
        assert [span.name for span in sorted(told, key=lambda span: span.start_time_unix_nano)] == parts
        assert whole.start_time_unix_nano <= told[0].start_time_unix_nano
        assert told[-1].end_time_unix_nano <= whole.end_time_unix_nano
    assert spans["wait"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    shown = attributes(asked)
    assert shown == {"request_id": "traced", "prompt_tokens": 200, "model": "tiny", "outcome": "length"}
    told_of_run = {"request_id": "traced", "attempt": 1, "prompt_tokens": 200, "completion_tokens": 4}
    assert attributes(run) == {**told_of_run, "cached_tokens": 0, "outcome": "length"}


async def test_who_traces_nothing_puts_nothing_into_the_job(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with (
        running_worker(broker, model_dir, tmp_path) as fleet,
        running_gateway(broker) as (_, _, client),
    ):
        seen: list[str] = []
        claimed = fleet.loop._metrics.traces.claimed
        fleet.loop._metrics.traces.claimed = lambda claim, now: (  # type: ignore[method-assign]
            seen.append(claim.job.traceparent),
            claimed(claim, now),
        )[1]
        request = GenerateRequest(token_ids=TokenIds(ids=[5, 6]), stopping=Stopping(max_tokens=2, ignore_eos=True))
        assert await collect(client.generate(request, metadata=(("traceparent", CALLER),)))
    assert seen == [""]
