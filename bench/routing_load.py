"""What policies are compared with: groups of prompts with long beginnings in common, that arrive by themselves. Pure.

All policies get the same prompts at the same moments. Which they are follows from the seed alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.workload import FIRST_ID
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.workload import Lengths

GROUPS: Final = "groups"
HOT: Final = "hot prefix"
HIT_FREE: Final = "hit-free"
MOST_HIT_FREE_LOAD: Final = 0.8
"""Loads are multiples of what the fleet answers without hits: above 1, one that has none would tell of queues only."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One load of a sweep. `groups`: beginnings that prompts share; 0 where no two prompts have one in common. `ratio`:
    tokens of all of them over those of one worker's pool. `load`: arrivals over what the fleet answers without hits."""

    kind: str
    groups: int
    ratio: float
    load: float

    @property
    def name(self) -> str:
        """For people: `ratio 2`, `hot prefix`, `hit-free`."""
        return f"ratio {self.ratio:g}" if self.kind == GROUPS else self.kind


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when it is due, in seconds since the run began, and what it asks for. `group` -1: of none."""

    due_s: float
    group: int
    prompt: tuple[int, ...]
    output_tokens: int

    def request(self, salt: str) -> inference_pb2.GenerateRequest:
        """Greedy, and past the end of text, so that every answer has the length that was asked for. `salt` keeps runs
        from each other's caches."""
        return inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=self.prompt),
            sampling=inference_pb2.Sampling(temperature=0.0),
            stopping=inference_pb2.Stopping(max_tokens=self.output_tokens, ignore_eos=True),
            cache_salt=salt,
        )


@dataclass(frozen=True, slots=True)
class GroupedLoad:
    """How prompts look. Lengths in tokens; a prompt is its group's prefix and a tail of its own."""

    prefix_tokens: int
    tail_tokens: Lengths
    output_tokens: Lengths
    seed: int = 0

    def asks(self, scenario: Scenario, rate: float, seconds: float, vocab_size: int) -> list[Ask]:
        """Arrivals of a Poisson process of `rate` per second, each of a group drawn evenly."""
        numbers = random.Random(f"{self.seed}/{scenario.name}/{scenario.load:g}")
        prefixes = [self._prefix(group, vocab_size) for group in range(scenario.groups)]
        asks = []
        for due_s in arrivals(rate, seconds, self.seed):
            group = numbers.randrange(scenario.groups) if scenario.groups else -1
            asks.append(self._ask(due_s, group, prefixes, numbers, vocab_size))
        return asks

    def endless(self, groups: int, vocab_size: int) -> Iterator[Ask]:
        """Requests without end, of one group after the other, or of none; all due at once, with tails that no run has.
        Groups come in another order each time."""
        numbers = random.Random(f"{self.seed}/endless")
        prefixes = [self._prefix(group, vocab_size) for group in range(groups)]
        while True:
            for group in numbers.sample(range(groups), groups) if groups else (-1,):
                yield self._ask(0.0, group, prefixes, numbers, vocab_size)

    def _ask(
        self, due_s: float, group: int, prefixes: Sequence[tuple[int, ...]], numbers: random.Random, vocab_size: int
    ) -> Ask:
        prefix = prefixes[group] if prefixes else _tokens(numbers, self.prefix_tokens, vocab_size)
        tail = _tokens(numbers, self.tail_tokens.draw(numbers), vocab_size)
        return Ask(due_s, group, (*prefix, *tail), self.output_tokens.draw(numbers))

    def _prefix(self, group: int, vocab_size: int) -> tuple[int, ...]:
        return _tokens(random.Random(f"{self.seed}/prefix/{group}"), self.prefix_tokens, vocab_size)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments of a Poisson process, in seconds, in order, below `seconds`.

    Raises:
        ValueError: `rate` isn't positive.
    """
    if rate <= 0:
        raise ValueError(f"{rate:g} arrivals per second are none")
    numbers = random.Random(f"{seed}/arrivals")
    moments, now = [], numbers.expovariate(rate)
    while now < seconds:
        moments.append(now)
        now += numbers.expovariate(rate)
    return moments


def scenarios(
    ratios: Sequence[float],
    loads: Sequence[float],
    *,
    pool_tokens: int,
    prefix_tokens: int,
    hot: bool,
    hit_free: bool,
) -> list[Scenario]:
    """All loads of a sweep, in order: every ratio, then one hot prefix, then prompts that have nothing in common."""
    found = []
    for ratio in ratios:
        groups = max(1, round(ratio * pool_tokens / prefix_tokens))
        found += [Scenario(GROUPS, groups, ratio, load) for load in loads]
    if hot:
        found += [Scenario(HOT, 1, prefix_tokens / pool_tokens, load) for load in loads]
    if hit_free:
        low = dict.fromkeys(min(load, MOST_HIT_FREE_LOAD) for load in loads)
        found += [Scenario(HIT_FREE, 0, 0.0, load) for load in low]
    return found


def _tokens(numbers: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    first = min(FIRST_ID, vocab_size // 2)
    return tuple(numbers.choices(range(first, vocab_size), k=count))
