"""Offline workloads: what an engine is given at once, and what its times say. The same for ours and for every peer.

========  =======================================================================================
workload  what
========  =======================================================================================
A         32 prompts of 128 tokens, 64 new tokens each
B         32 prompts of 544 tokens, the first 512 of which they share and no cache has; 32 new each
D1        1 prompt of 128 tokens; the rate of decoding alone, over 128 new tokens
D8, D32   the same with 8 and 32 at once
========  =======================================================================================

Pure: no clock, no I/O, no library.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.stats import percentile
from bench.workload import FIRST_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

Prompts = list[list[int]]


class BadAnswerError(ValueError):
    """An engine did not do what it was given to do."""


@dataclass(frozen=True, slots=True)
class Load:
    """One workload. Lengths in tokens."""

    name: str
    count: int
    """Prompts, all given at once."""
    shared: int
    """Of each prompt: what all of one round begin with."""
    own: int
    new: int
    """Of each answer. The end of text is ignored."""
    decoding: bool
    """The rate is that of decoding alone, once every sequence has its first token."""

    @property
    def longest(self) -> int:
        """Tokens of a sequence when it has ended."""
        return self.shared + self.own + self.new

    def prompts(self, turn: int, vocab_size: int, seed: int = 0) -> Prompts:
        """Token ids drawn evenly, others in every turn, so that none finds the last turn's prompts in a cache.

        Turn 0 is the warm-up.
        """
        numbers = random.Random(f"{seed}/{self.name}/{turn}")
        first = min(FIRST_ID, vocab_size // 2)

        def drawn(length: int) -> list[int]:
            return [numbers.randrange(first, vocab_size) for _ in range(length)]

        shared = drawn(self.shared)
        return [[*shared, *drawn(self.own)] for _ in range(self.count)]


LOADS: Final = {
    load.name: load
    for load in (
        Load("A", count=32, shared=0, own=128, new=64, decoding=False),
        Load("B", count=32, shared=512, own=32, new=32, decoding=False),
        Load("D1", count=1, shared=0, own=128, new=128, decoding=True),
        Load("D8", count=8, shared=0, own=128, new=128, decoding=True),
        Load("D32", count=32, shared=0, own=128, new=128, decoding=True),
    )
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of one turn: for each prompt its new tokens, and when each was there.

    Times are in seconds from the moment before the first prompt was handed over.
    """

    tokens: list[list[int]]
    times: list[list[float]]

    def check(self, load: Load) -> None:
        """Raises BadAnswerError unless every prompt has all its tokens, and a time for each."""
        if len(self.tokens) != load.count:
            raise BadAnswerError(f"{len(self.tokens)} answers to {load.count} prompts")
        for index, (tokens, times) in enumerate(zip(self.tokens, self.times, strict=True)):
            if len(tokens) != load.new:
                raise BadAnswerError(f"answer {index} has {len(tokens)} tokens, not {load.new}")
            if len(times) != load.new:
                raise BadAnswerError(f"answer {index} has {len(times)} times for {load.new} tokens")


def rate(load: Load, answer: Answer) -> float:
    """Tokens per second: all of them over the whole time; or, of decoding, those that came while all were under way.

    Raises:
        BadAnswerError: the times don't say how long it took.
    """
    if load.decoding:
        begin, end = max(times[0] for times in answer.times), min(times[-1] for times in answer.times)
    else:
        begin, end = 0.0, max(times[-1] for times in answer.times)
    counted = sum(begin < time <= end for times in answer.times for time in times)
    if end <= begin or counted < load.count:
        raise BadAnswerError("the answers came one after the other, or all at once: that tells no rate")
    return counted / (end - begin)


def agreement(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """The share of answers that begin exactly as the reference's do, over as many tokens as that has."""
    same = [list(mine[: len(theirs)]) == list(theirs) for mine, theirs in zip(tokens, reference, strict=True)]
    return sum(same) / len(same)


def summary(rates: Sequence[float]) -> dict[str, float]:
    """Median, extremes, and the distance of the extremes as a share of the median."""
    middle = percentile(rates, 50)
    return {"median": middle, "least": min(rates), "most": max(rates), "spread": (max(rates) - min(rates)) / middle}


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> dict[str, float] | None:
    """Ours over theirs, of rounds in which both were measured: median and extremes. None without any."""
    found = [mine / other for mine, other in zip(ours, theirs, strict=True) if mine is not None and other is not None]
    if not found:
        return None
    return {"median": percentile(found, 50), "least": min(found), "most": max(found)}


def shown(value: float | None, digits: int = 0) -> str:
    """A figure of a table; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"
