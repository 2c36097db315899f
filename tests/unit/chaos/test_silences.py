"""Silences, from histories that are written by hand."""

from __future__ import annotations

from bench.chaos.history import GENERATE, Call, Called, Came, Ended, Invoked, Request
from bench.chaos.silences import longest_silence, silences


def request(*calls: list[tuple[float, int, int]], name: str = "r", finish: str = "STOP") -> Request:
    """Each call a list of (time, first index, tokens); the last chunk of the last call is the end."""
    made = Request(Invoked(name, 0.0, "d", "greedy"))
    for number, chunks in enumerate(calls):
        call = Call(Called(name, number, 0.0, GENERATE, "g"))
        for at, start, count in chunks:
            end = finish if (number, (at, start, count)) == (len(calls) - 1, chunks[-1]) else ""
            call.chunks.append(Came(name, number, at, 0, start, tuple(range(count)), "x" * count, end))
        call.ended = Ended(name, number, chunks[-1][0], "OK")
        made.calls.append(call)
    return made


def test_the_longest_between_two_new_tokens() -> None:
    assert longest_silence(request([(1.0, 0, 1), (1.5, 1, 2), (1.7, 3, 1)])) == 0.5
    assert longest_silence(request([(1.0, 0, 4)])) is None


def test_what_a_replay_brings_again_ends_no_silence() -> None:
    assert longest_silence(request([(1.0, 0, 1), (2.0, 1, 1)], [(5.0, 0, 2), (8.0, 2, 1)])) == 6.0


def test_only_the_finished_count() -> None:
    answered = [request([(0.0, 0, 1), (float(wait), 1, 1)], name=f"r{wait}") for wait in range(1, 6)]
    failed = request([(0.0, 0, 1), (50.0, 1, 1)], name="failed", finish="ERROR")
    assert silences([*answered, failed]) == {"p50": 3.0, "p90": 4.6, "p99": 4.96, "max": 5.0}
    assert silences([failed]) == {}
