"""`octavo tune`: which size of blocks, and how long runs of neighbours, suit this machine.

What larger blocks and longer runs may gain is time, for a step reads keys and values in larger pieces. What larger
blocks cost is memory, for the last block of a sequence is partly empty. Both are measured, and weighed by one rule.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench.machine import describe_machine
from bench.stats import percentile
from bench.tune_pool import FRESH, PIECES, WORN, neighbours, tables
from bench.tune_proposal import propose
from bench.waste import measure_waste

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bench.tune_model import Subject

WARM_UP: Final = 1
"""Steps of each turn that don't count: they bring the tables' pages into the processor's caches, if they fit."""


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """One run. Sizes are in tokens, runs in blocks."""

    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    block_runs: tuple[int, ...] = (4, 16)
    """Beside 1, which is always measured."""
    contexts: tuple[int, ...] = (64, 512, 4096)
    sequences: tuple[int, ...] = (1, 8, 32)
    rounds: int = 5
    steps: int = 2
    """Of each variant in each round."""
    requests: int = 150
    """Of the mixed load that waste is measured on."""
    most_unused: float = 0.04
    """What share of the allocated slots may hold nothing in a setting that is proposed."""
    seed: int = 0
    model: str = "smollm2-135m"
    dtype: str = "auto"
    kernels: str = "auto"
    threads: int = 0
    """0: one per core."""
    kv_tokens: int = 32768
    cache_dir: Path = Path("~/.cache/octavo")


class Variant(NamedTuple):
    """A setting, and a pool's state."""

    block_size: int
    block_run: int
    state: str

    def __str__(self) -> str:
        return f"blocks of {self.block_size} in runs of {self.block_run}, {self.state} pool"


class Point(NamedTuple):
    """A step: so many sequences, each with a context of so many tokens."""

    context: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.sequences} x {self.context}"


Times = dict[tuple[Variant, Point], list[float]]
"""Of each round the median of its steps, in seconds."""
Given = dict[tuple[Variant, Point], list[list[int]]]
"""The tables of a step's sequences."""


def variants_of(config: TuneConfig) -> list[Variant]:
    """All that are measured: without runs in every state, with them in all but pieces, where there are none."""
    made = []
    for block_size in sorted({*config.block_sizes}):
        made += [Variant(block_size, 1, state) for state in (PIECES, FRESH, WORN)]
        made += [
            Variant(block_size, run, state) for run in sorted({*config.block_runs} - {1}) for state in (FRESH, WORN)
        ]
    return made


def points_of(config: TuneConfig, context_length: int, note: Callable[[str], None]) -> list[Point]:
    """All that the model and the memory have room for. Tells which are left out.

    Raises:
        ValueError: there is room for none.
    """
    points = []
    largest = max(config.block_sizes)
    for context in sorted({*config.contexts}):
        for sequences in sorted({*config.sequences}):
            if context > context_length:
                note(f"{sequences} x {context} is left out: the model's context is {context_length}")
            elif sequences * -(-context // largest) > config.kv_tokens // largest:
                note(f"{sequences} x {context} is left out: the pages hold {config.kv_tokens} tokens")
            else:
                points.append(Point(context, sequences))
    if not points:
        raise ValueError("no step of these sizes has room in the model's context and pages")
    return points


def run_tune(
    config: TuneConfig,
    subject: Subject,
    note: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures waste, then all variants at all points; returns what is printed as JSON, which `keep` gets after each
    round, too. Ctrl-C (KeyboardInterrupt) ends it with the rounds that were done until then.

    Raises:
        ValueError: there is no room for any step of these sizes.
        KeyboardInterrupt: no round had been done.
    """
    points, variants = points_of(config, subject.context_length, note), variants_of(config)
    note(f"{len(variants)} variants, {len(points)} kinds of steps; {config.rounds} rounds of {config.steps} steps each")
    unused = {size: _unused(config, size, note) for size in sorted({*config.block_sizes})}
    given = {(variant, point): _tables(config, subject, variant, point) for variant in variants for point in points}
    times: Times = {each: [] for each in given}
    results: dict[str, Any] = {}
    try:
        for whole in measure(config, subject, given, times, note):
            results = _results(config, subject, given, times, unused, rounds=whole)
            keep(results)
    except KeyboardInterrupt:
        if not results:
            raise
        note("interrupted; what was measured is kept")
    return results


def _results(
    config: TuneConfig,
    subject: Subject,
    given: Given,
    times: Times,
    unused: Mapping[int, float],
    *,
    rounds: int,
) -> dict[str, Any]:
    """What is known when so many rounds are done."""
    points = list(dict.fromkeys(point for _, point in given))
    variants = list(dict.fromkeys(variant for variant, _ in given))
    usual = reference(config)
    measured = [
        {
            **variant._asdict(),
            "neighbours": _share([given[variant, point] for point in points]),
            "unused": unused[variant.block_size],
            "ratio": ratio(times, variant, usual, points),
            "ratio_p75": percentile(by_round(times, variant, usual, points), 75),
            "steps": [{**point._asdict(), **_spread(times[variant, point])} for point in points],
        }
        for variant in variants
    ]
    return {
        "machine": describe_machine(),
        "config": {**asdict(config), "cache_dir": str(config.cache_dir)},
        "kernels": subject.level,
        "threads": subject.threads,
        "dtype": subject.dtype,
        "rounds": rounds,
        "interrupted": rounds < config.rounds,
        "variants": measured,
        "proposal": propose(measured, config.most_unused),
    }


def measure(
    config: TuneConfig, subject: Subject, given: Given, times: Times, note: Callable[[str], None]
) -> Iterator[int]:
    """All variants take turns at one kind of step after the other, in another order in each round. Each round is added
    to ``times`` when it is whole; then its number comes, from 1."""
    points = list(dict.fromkeys(point for _, point in given))
    order = list(dict.fromkeys(variant for variant, _ in given))
    numbers = random.Random(f"{config.seed}/order")
    for turn in range(1, config.rounds + 1):
        note(f"round {turn} of {config.rounds}")
        found: dict[tuple[Variant, Point], float] = {}
        for point in points:
            numbers.shuffle(order)
            for variant in order:
                block_tables = given[variant, point]
                steps = [
                    subject.step(variant.block_size, block_tables, point.context) for _ in range(WARM_UP + config.steps)
                ]
                found[variant, point] = percentile(steps[WARM_UP:], 50)
        for each, time in found.items():
            times[each].append(time)
        yield turn


def reference(config: TuneConfig) -> Variant:
    """What a variant is compared with: the smallest blocks without runs, in a worn pool."""
    return Variant(min(config.block_sizes), 1, WORN)


def ratio(times: Times, variant: Variant, other: Variant, points: Sequence[Point]) -> float:
    """A variant's times over another's: in each round, the median over rounds, the geometric mean over steps' kinds."""
    return _mean([percentile(_ratios(times, variant, other, point), 50) for point in points])


def by_round(times: Times, variant: Variant, other: Variant, points: Sequence[Point]) -> list[float]:
    """The same, round by round."""
    each = [_ratios(times, variant, other, point) for point in points]
    return [_mean(ratios) for ratios in zip(*each, strict=True)]


def _ratios(times: Times, variant: Variant, other: Variant, point: Point) -> list[float]:
    return [mine / theirs for mine, theirs in zip(times[variant, point], times[other, point], strict=True)]


def _mean(ratios: Sequence[float]) -> float:
    """The geometric one: twice and half are none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _tables(config: TuneConfig, subject: Subject, variant: Variant, point: Point) -> list[list[int]]:
    return tables(
        variant.state,
        num_blocks=subject.num_blocks(variant.block_size),
        block_size=variant.block_size,
        block_run=variant.block_run,
        sequences=point.sequences,
        context=point.context,
        seed=config.seed,
    )


def _unused(config: TuneConfig, block_size: int, note: Callable[[str], None]) -> float:
    note(f"waste with blocks of {block_size}: {config.requests} requests of all lengths")
    return measure_waste(requests=config.requests, seed=config.seed, block_size=block_size).unused


def _share(given: Sequence[Sequence[Sequence[int]]]) -> float | None:
    """Of the blocks that have one before them, how many lie right behind it. None when none has."""
    found = [neighbours(each) for each in given]
    behind, could = sum(each[0] for each in found), sum(each[1] for each in found)
    return behind / could if could else None


def _spread(times: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    return {
        "median_ms": 1000 * percentile(times, 50),
        "least_ms": 1000 * min(times),
        "most_ms": 1000 * max(times),
    }
