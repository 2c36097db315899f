"""How long clients waited in the middle of their answers: what faults cost those who lost nothing. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from bench.chaos.history import BAD
from bench.chaos.streams import seen_of
from bench.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.chaos.history import Request


def longest_silence(request: Request) -> float | None:
    """Seconds between two new tokens of any choice, the longest there was; None with fewer than two."""
    return max((after - before for before, after in pairwise(new_tokens_at(request))), default=None)


def new_tokens_at(request: Request) -> list[float]:
    """When tokens came that the client did not have; what a replay brings again is not new."""
    known: set[tuple[int, int]] = set()
    times: list[float] = []
    for chunk in sorted((chunk for call in request.streams for chunk in call.chunks), key=lambda chunk: chunk.at):
        new = {(chunk.choice, index) for index in range(chunk.start, chunk.start + len(chunk.tokens))} - known
        if new:
            known |= new
            times.append(chunk.at)
    return times


def silences(requests: Iterable[Request]) -> dict[str, float]:
    """Over the requests that were finished, in seconds: p50, p90, p99 and max of their longest silences; empty without
    any."""
    finished = (each for each in requests if each.invoked.role != BAD and all(one.whole for one in seen_of(each)))
    found = [silence for each in finished if (silence := longest_silence(each)) is not None]
    if not found:
        return {}
    ranks = {f"p{rank}": round(percentile(found, rank), 3) for rank in (50, 90, 99)}
    return {**ranks, "max": round(max(found), 3)}
