"""From readings to the figures of `octavo bench path`: exact numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.path_figures import (
    CPU_COLUMNS,
    FIRST_COLUMNS,
    STREAM_COLUMNS,
    First,
    Streams,
    Told,
    Values,
    cpu_rows,
    first_figures,
    first_parts,
    first_rows,
    parse,
    since,
    stream_figures,
    stream_rows,
    told_aims,
)

ENGINE = {"schedule": 0.001, "model": 0.016, "sample": 0.002, "detokenise": 0.001, "step": 0.020}


def summary(name: str, labels: str, seconds: float, times: int) -> Values:
    return {f"{name}_sum{labels}": seconds, f"{name}_count{labels}": float(times)}


def told(requests: int = 1, tokens: int = 4) -> Told:
    """Of requests with so many tokens each, every one of which was a step, a commit and a response of its own."""
    steps = requests * tokens

    def part(name: str, each: float, times: int) -> Values:
        return summary("octavo_part_seconds", f'{{part="{name}"}}', each * times, times)

    def call(name: str, each: float, times: int) -> Values:
        return summary("octavo_broker_seconds", f'{{call="{name}"}}', each * times, times)

    gateway = {
        **part("check", 0.001, requests),
        **part("tokenize", 0.002, requests),
        **part("send", 0.004, requests),
        **part("relay", 0.001, steps),
        **call("submit", 0.003, requests),
        **summary("octavo_time_to_first_token_seconds", "", 0.050 * requests, requests),
        "process_cpu_seconds_total": 0.008,
    }
    worker = {
        **part("wait", 0.002, requests),
        **part("take", 0.0005, steps),
        **part("record", 0.0005, steps),
        **call("claim", 0.003, requests),
        **call("commit", 0.004, steps),
        **summary("octavo_step_seconds", "", 0.020 * steps, steps),
        "process_cpu_seconds_total": 0.100,
        'octavo_thread_seconds_total{thread="loop"}': 0.020,
        'octavo_thread_seconds_total{thread="engine"}': 0.050,
    }
    return Told(gateway, worker)


FIRST = First(
    told(), first_token=0.060, prefill=0.025, engine_first_token=0.050, engine_parts={**ENGINE, "model": 0.020}
)
STREAMS = Streams(
    told(requests=2),
    tokens=8,
    wall=0.250,
    client_cpu=0.016,
    broker_cpu=0.004,
    engine_wall=0.200,
    engine_parts={name: 8 * seconds for name, seconds in ENGINE.items()},
)


def milliseconds(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(1000 * seconds, 6) for name, seconds in parts.items()}


def test_a_reading_is_what_a_process_serves_without_its_comments() -> None:
    text = '# HELP a b\n# TYPE a counter\na_total{x="y z"} 2.0\nb_sum 1e-3\n'
    assert parse(text) == {'a_total{x="y z"}': 2.0, "b_sum": 0.001}
    with pytest.raises(ValueError, match="float"):
        parse("<html> oh")


def test_what_was_not_there_before_began_at_nothing() -> None:
    assert since({"a": 1.0, "gone": 5.0}, {"a": 3.0, "new": 2.0}) == {"a": 2.0, "new": 2.0}


def test_the_parts_of_a_first_token_add_up_to_what_its_client_saw() -> None:
    parts = first_parts(FIRST)
    assert milliseconds(parts) == {
        "check": 1,
        "tokenize": 2,
        "route": 1,
        "submit": 3,
        "claim": 3,
        "wait": 2,
        "step": 23,
        "take": 0.5,
        "record": 0.5,
        "commit": 4,
        "relay": 1,
        "log read": 0,
        "between": 9,
        "client": 10,
    }
    assert sum(parts.values()) == pytest.approx(0.060)


def test_a_log_that_was_read_is_a_part_of_the_way() -> None:
    read = {**FIRST.told.gateway, **summary("octavo_broker_seconds", '{call="xrange"}', 0.006, 2)}
    parts = first_parts(replace(FIRST, told=Told(read, FIRST.told.worker)))
    assert (milliseconds(parts)["log read"], milliseconds(parts)["between"]) == (6, 3)


def test_a_metric_that_a_process_does_not_have_is_no_zero() -> None:
    worker = {name: value for name, value in FIRST.told.worker.items() if "wait" not in name}
    with pytest.raises(KeyError, match="wait"):
        first_parts(replace(FIRST, told=Told(FIRST.told.gateway, worker)))


def test_first_tokens_are_told_by_their_medians() -> None:
    slow = replace(FIRST, first_token=0.090)
    figures = first_figures([slow, FIRST, replace(FIRST, first_token=0.061)])
    assert (figures["requests"], figures["service_ms"], figures["engine_ms"]) == (3, 61, 50)
    assert figures["extra_ms"] == pytest.approx(11)
    assert figures["least_extra_ms"] == pytest.approx(10)
    assert figures["parts_ms"]["client"] == pytest.approx(11)
    assert figures["engine_parts_ms"] == {"schedule": 1, "model": 20, "sample": 2, "detokenise": 1}


def test_streams_are_told_per_token_and_each_time() -> None:
    figures = stream_figures([STREAMS, replace(STREAMS, wall=0.400), replace(STREAMS, wall=0.200)], 2)
    assert (figures["concurrency"], figures["rounds"], figures["tokens"]) == (2, 3, 8)
    commit, submit = figures["parts"]["commit"], figures["parts"]["submit"]
    assert (round(commit["us_per_token"], 6), round(commit["ms_each"], 6)) == (4000, 4)
    assert (round(submit["us_per_token"], 6), round(submit["ms_each"], 6)) == (750, 3)
    assert {name: round(value, 6) for name, value in figures["cpu_us_per_token"].items()} == {
        "gateway": 1000,
        "broker": 500,
        "worker's event loop": 2500,
        "worker's engine thread": 6250,
        "worker's other threads": 3750,
        "client": 2000,
    }
    assert figures["engine_us_per_token"]["model"] == pytest.approx(16_000)
    assert (figures["service_tokens_per_s"], figures["engine_tokens_per_s"]) == (32, 40)
    assert (figures["least_ratio"], figures["ratio"], figures["most_ratio"]) == (0.5, 0.8, 1.0)


def test_tables_have_a_cell_for_each_column_and_a_sentence_tells_the_aims() -> None:
    first, streams = first_figures([FIRST]), stream_figures([STREAMS], 2)
    rows: dict[tuple[str, ...], list[tuple[str, ...]]] = {
        FIRST_COLUMNS: first_rows(first),
        STREAM_COLUMNS: stream_rows(streams),
        CPU_COLUMNS: cpu_rows(streams),
    }
    assert all(len(row) == len(columns) for columns, table in rows.items() for row in table)
    assert ("step", "23.00 ms", "24.00 ms") in rows[FIRST_COLUMNS]
    assert ("  model", "-", "20.00 ms") in rows[FIRST_COLUMNS]
    assert rows[FIRST_COLUMNS][-1] == ("in all", "60.00 ms", "50.00 ms")
    assert ("step", "20000.0 us", "20.00 ms", "20000.0 us") in rows[STREAM_COLUMNS]
    assert rows[STREAM_COLUMNS][-1] == ("wall time", "31250.0 us", "-", "25000.0 us")
    assert told_aims(first, streams) == (
        "The first token comes 10.0 ms later than in one process (the least was 10.0; the aim is at most 5). "
        "2 streams get 32 tokens/s, 80.0% of the 40 in one process (80.0% to 80.0%; the aim is at least 90%)."
    )


def test_a_system_without_clocks_of_threads_has_no_figures_of_them() -> None:
    worker: dict[str, Any] = {name: value for name, value in STREAMS.told.worker.items() if "thread" not in name}
    figures = stream_figures([replace(STREAMS, told=Told(STREAMS.told.gateway, worker))], 2)
    assert figures["cpu_us_per_token"]["worker's engine thread"] == 0
    assert figures["cpu_us_per_token"]["worker's other threads"] == pytest.approx(12_500)
