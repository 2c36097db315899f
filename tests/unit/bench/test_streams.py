"""`octavo bench streams`: figures, what is taken for wrong, and what the command prints; no fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from bench import streams
from bench.streams import StreamsConfig, StreamsFailed
from bench.streams_client import take_apart
from bench.streams_figures import Gateway, Kept, Told, added, figures, stream_cells, unexpected, window_of, wrong
from ops.cli import main


def told(*arrivals: tuple[float, int], output: list[int] | str = "", sent: float = 0.0) -> Told:
    return Told(sent, [*arrivals], output)


def kept(output: list[int] | str, *committed: tuple[float, int]) -> Kept:
    return Kept([*committed], output, len(output))


def test_what_is_added_is_counted_until_all_of_a_commit_has_arrived() -> None:
    committed = [(1.0, 1), (2.0, 3), (3.0, 4), (4.0, 5)]
    arrivals = [(1.1, 1), (2.2, 2), (3.5, 4), (9.0, 4)]
    assert added(committed, arrivals, (0.0, 9.0)) == pytest.approx([0.1, 1.5, 0.5])  # the last one never came
    assert added(committed, arrivals, (1.5, 3.0)) == pytest.approx([1.5])


def test_the_window_is_while_all_streams_are_open() -> None:
    streams = [told((1.0, 1), (5.0, 9)), told((2.0, 1), (4.0, 9))]
    assert window_of(streams) == (2.0, 4.0)
    assert window_of([*streams, told()]) == (0.0, 0.0)


def test_figures_of_a_load() -> None:
    """Two streams with a token each second; the gateway passes one on after 10 ms, the other after 30."""
    loads = [
        told(*((second + late, second) for second in range(1, 6)), sent=0.5, output=[1] * 5) for late in (0.01, 0.03)
    ]
    logs = [kept([1] * 5, *((float(second), second) for second in range(1, 6)))] * 2
    made = figures(loads, logs, Gateway(cpu_s=0.004, before=1000, open=5000))
    assert made["tokens"] == 8  # from 1.03 to 5.01: those of 2, 3, 4 and 5
    assert made["tokens_per_s"] == pytest.approx(8 / 3.98)
    assert made["added_s"]["p50"] == pytest.approx(0.02)
    assert made["added_s"]["max"] == pytest.approx(0.03)
    assert made["first_token_s"]["max"] == pytest.approx(0.53)
    assert made["gateway_cpu_s_per_token"] == pytest.approx(0.0005)
    assert made["gateway_bytes_per_stream"] == 2000
    cells = stream_cells("grpc", made)
    assert cells[:4] == ("grpc", "8", "2", "20.0 ms")
    assert cells[-2:] == ("500 us", "2 KB")


def test_a_load_without_a_moment_in_which_all_were_open_has_no_figures() -> None:
    made = figures([told((1.0, 1)), told((2.0, 1))], [kept("a", (0.9, 1))] * 2, Gateway(0.1, 0, 0))
    assert (made["tokens"], made["tokens_per_s"], made["added_s"]) == (0, None, None)
    assert set(stream_cells("x", made)[1:]) == {"-"}


def test_what_is_wrong_is_counted() -> None:
    good, other = kept([1, 2]), kept([1, 3])
    failed = Told(error="UNAVAILABLE")
    mine = [told(output=[1, 2]), told(output=[1, 3]), told(output=[1, 3]), failed, told(output=[1])]
    logs = [good, good, other, good, kept([1])]
    assert wrong(mine, logs, [good] * 5, 2) == {
        "other tokens than its log has": 1,
        "other tokens than the same prompt brought before": 1,
        "UNAVAILABLE": 1,
        "1 tokens": 1,
    }
    assert wrong(mine[:1], logs[:1], None, 2) == {}


def test_troublemakers_must_be_answered_as_expected() -> None:
    expected = {"huge": "413", "broken": "400", "left": "left"}
    assert unexpected({"huge": {"413": 3}, "broken": {"400": 1}, "left": {"left": 1}}, expected) == []
    assert unexpected({"huge": {"413": 3, "200": 1}, "broken": {}}, expected) == [
        "huge: 200, 1 times",
        "broken: never sent",
        "left: never sent",
    ]


def response(*events: str, end: bool = True) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n" % (len(body), body) + b"0\r\n\r\n" * end


def event(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text}]})


def test_a_response_is_taken_apart_wherever_it_was_cut() -> None:
    data = response(event("ab"), event("ü"), event(""), "[DONE]")
    for cut in range(1, len(data)):
        found = Told()
        take_apart([(1.0, data[:cut]), (2.0, data[cut:])], found)
        assert (found.output, found.error) == ("abü", ""), cut
        assert found.arrivals in ([(2.0, 3)], [(1.0, 2), (2.0, 3)], [(1.0, 3)]), cut


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (response(event("ab"), "[DONE]", end=False), "no end"),
        (response(event("ab"), '{"error": {"message": "gone"}}'), "no end"),
        (b"HTTP/1.1 503 x\r\ncontent-length: 2\r\n\r\n{}", "status 503, and no whole answer"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(data: bytes, error: str) -> None:
    found = Told()
    take_apart([(1.0, data)], found)
    assert found.error == error


def test_a_connection_that_brought_nothing_is_an_error() -> None:
    found = Told()
    take_apart([], found)
    assert found.error == "status 0, and no whole answer"


def test_prompts_are_the_same_in_each_load_and_no_two_alike() -> None:
    config = StreamsConfig(streams=20, prompt_tokens=40)
    first, second = config.requests("a"), config.requests("b")
    assert [each.text for each in first] == [each.text for each in second]
    assert len({each.text for each in first}) == 20
    assert {len(each.text) for each in first} == {40}
    assert not {each.request_id for each in first} & {each.request_id for each in second}


def test_too_few_workers_are_refused() -> None:
    ran = CliRunner().invoke(main, ["bench", "streams", "--streams", "500", "--workers", "9"])
    assert (ran.exit_code, "9 workers are too few for 500 streams: at least 10" in ran.stderr) == (2, True)


def test_a_load_may_take_several_times_its_steps() -> None:
    assert StreamsConfig(streams=500, tokens=40, step_ms=500).patience_s == pytest.approx(240)


def test_a_touched_stream_is_the_commands_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise StreamsFailed("of 2 streams by http, no end: 1")

    monkeypatch.setattr(streams, "run_streams", fail)
    ran = CliRunner().invoke(main, ["bench", "streams"])
    assert (ran.exit_code, ran.stderr) == (1, "Error: of 2 streams by http, no end: 1\n")
