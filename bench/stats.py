"""From samples to figures. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times in seconds since it was sent."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    seconds_per_token: float | None = None
    """Mean time between output tokens after the first; None with fewer than two."""
    total_s: float = 0.0
    error: str = ""
    """Status and message of a failed call; its figures count nowhere else."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is distributed over requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Level:
    """What was measured at one concurrency. Rates are over the wall time from the first send to the last end."""

    concurrency: int
    requests: int
    errors: dict[str, int]
    """Failed calls by message."""
    wall_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens. A cached prompt token counts like any other."""
    first_token_s: Spread | None
    seconds_per_token: Spread | None
    total_s: Spread | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def place_of(count: int, percent: float) -> float:
    """Where a percentile lies among `count` values in order, from 0; between two of them as a rule."""
    return (count - 1) * percent / 100


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated linearly between neighbours.

    Raises:
        ValueError: no values, or `percent` outside 0 to 100.
    """
    if not values:
        raise ValueError("no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} is not a percentage")
    ordered = sorted(values)
    place = place_of(len(ordered), percent)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread | None:
    """None without values."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return Spread(mean=math.fsum(values) / len(values), p50=p50, p90=p90, p99=p99, max=max(values))


def summarise(concurrency: int, samples: Sequence[Sample], wall_s: float) -> Level:
    """The figures of one level. `wall_s` must be positive."""
    good = [sample for sample in samples if not sample.error]
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    output_tokens = sum(sample.output_tokens for sample in good)
    return Level(
        concurrency=concurrency,
        requests=len(samples),
        errors=dict(Counter(sample.error for sample in samples if sample.error)),
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(sample.cached_tokens for sample in good),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / wall_s,
        first_token_s=spread([s.first_token_s for s in good if s.first_token_s is not None]),
        seconds_per_token=spread([s.seconds_per_token for s in good if s.seconds_per_token is not None]),
        total_s=spread([s.total_s for s in good]),
    )
