"""Lines that `octavo bench batch` submits, and its table."""

from __future__ import annotations

from bench.batch import COLUMNS, BatchBench, cells, raw
from bench.stats import Sample, summarise
from bench.workload import Lengths, Workload
from gateway.batch.lines import checked

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
