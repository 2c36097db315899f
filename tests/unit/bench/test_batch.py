"""Lines that `octavo bench batch` submits, and its table."""

from __future__ import annotations

from bench.batch import COLUMNS, BatchBench, Outcome, cells, raw, told, verdict
from bench.stats import Sample, summarise
from bench.workload import Lengths, Workload
from gateway.batch.lines import checked
from kvstore.batches import Batch, BatchState, Progress

WORKLOAD = Workload(Lengths(8, 16), Lengths(4, 4), cache_salt="s")
CONFIG = BatchBench(WORKLOAD, lines=5, users=2, requests=3, in_flight=4, priority=-10)


def test_lines_ask_for_what_users_ask_for() -> None:
    requests = WORKLOAD.requests(5, 1000, 2)
    for request in requests:
        request.n = 1  # as a line says, whether it names it or not
    assert [line.request for _, line in checked(raw(requests))] == requests


def test_a_line_of_the_table() -> None:
    samples = [Sample(first_token_s=0.1, seconds_per_token=0.02, output_tokens=4)] * 3
    level = summarise(2, samples, 1.0)
    assert cells(CONFIG, level, None) == (2, "no", 3, 0, "100 ms", "100 ms", "20 ms", "20 ms", "-")
    assert cells(CONFIG, level, 12.34)[-1] == "12.3"
    nothing = summarise(2, [Sample(error="no")], 1.0)
    assert cells(CONFIG, nothing, None) == (2, "no", 1, 1, "-", "-", "-", "-", "-")
    assert len(COLUMNS) == len(cells(CONFIG, level, None))


def test_what_a_kill_lost_and_doubled_and_what_it_cost_is_told() -> None:
    levels = [summarise(2, [Sample(first_token_s=seconds)] * 3, 1.0) for seconds in (0.1, 0.125)]
    killed = Batch("b", BatchState.RUNNING, progress=Progress(done=2))
    ended = Batch("b", BatchState.COMPLETED, started_ms=1000, ended_ms=3000)
    results = told(CONFIG, levels[0], levels[1], Outcome(killed, ended, ["0", "1", "1", "3", "4"]))
    assert (results["lost"], results["doubled"], results["lines_per_s"]) == (1, 1, 2.5)
    assert verdict(results) == (
        "TTFT p90 beside the batch is 1.25 times that alone; its worker killed, after 2 of 5 lines: "
        "1 lines lost, 1 doubled"
    )
    late = told(CONFIG, levels[0], levels[1], Outcome(ended, ended, ["0", "1", "2", "3", "4"]))
    assert (late["ended_before_users"], late["lost"], late["doubled"]) == (True, 0, 0)
    assert "had ended before its users" in verdict(late)
