"""From samples of runs to what is told of policies. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.stats import Spread, place_of, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ANSWERED: Final = "answered"
REFUSED: Final = "refused"
"""RESOURCE_EXHAUSTED: the queues are full."""
UNANSWERED: Final = "unanswered"
"""Given up by the client after the run's end."""
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times in seconds; `due_s` since the run began, `lag_s` from there until it was
    sent, the others since it was sent."""

    due_s: float
    lag_s: float
    prompt_tokens: int
    outcome: str
    waited_s: float
    """Until its end, whichever."""
    error: str = ""
    worker: str = ""
    """That answered; empty without a first token."""
    cached_tokens: int = 0
    predicted_tokens: int = 0
    first_token_s: float | None = None
    tokens: tuple[tuple[float, int], ...] = ()
    """When output came, and how many tokens of it."""

    @property
    def sent_s(self) -> float:
        """Since the run began."""
        return self.due_s + self.lag_s

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between output tokens after the first; None with fewer than two."""
        count = sum(each for _, each in self.tokens)
        return (self.tokens[-1][0] - self.tokens[0][0]) / (count - 1) if count > 1 else None


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that counts, in seconds since it began: `begin` <= moment < `end`."""

    begin: float
    end: float

    def has(self, moment: float) -> bool:
        return self.begin <= moment < self.end

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run told of one policy. Latencies are of the requests that were due in the window; rates are of what
    came back within it, whenever that was asked for."""

    requests: int
    answered: int
    refused: int
    unanswered: int
    errors: dict[str, int]
    """Calls that failed otherwise, by message."""
    hit_rate: float | None
    """Prompt tokens found in a cache, of all of the prompts that have a first token."""
    first_token_s: Spread | None
    """Who was given up before its first token counts with the time that it had waited, which is too little. None where
    nobody got one."""
    first_token_at_least: tuple[str, ...]
    """Which of these figures are too little for that: they lie among, or behind, those who were given up."""
    seconds_per_token: Spread | None
    answers_per_s: float
    prompt_tokens_per_s: float
    """A prompt counts when its first token comes. Cached tokens count like any other."""
    output_tokens_per_s: float
    tokens_per_s: float
    """Both."""
    predicted_equal: float | None
    """Share of the requests with a first token whose predicted cached tokens were those found."""
    predicted_less: float | None
    """Fewer were predicted than found."""
    predicted_more: float | None
    workers: int
    """That answered any."""
    busiest: float | None
    """Share of the one that answered most."""
    lag_s: Spread | None
    """How late the load generator sent, by its own clock."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(samples: Sequence[Sample], window: Window) -> Figures:
    """The figures of one run, from all of its samples."""
    counted = [each for each in samples if window.has(each.due_s)]
    begun = [each for each in counted if each.first_token_s is not None]
    outcomes = Counter(each.outcome for each in counted)
    prompts = sum(each.prompt_tokens for each in samples if _began_in(each, window))
    output = sum(count for each in samples for at, count in each.tokens if window.has(each.sent_s + at))
    answers = sum(each.outcome == ANSWERED and window.has(each.sent_s + each.waited_s) for each in samples)
    by_worker = Counter(each.worker for each in begun)
    prompt_tokens = sum(each.prompt_tokens for each in begun)
    first_token_s, at_least = _first_tokens(counted)
    return Figures(
        requests=len(counted),
        answered=outcomes[ANSWERED],
        refused=outcomes[REFUSED],
        unanswered=outcomes[UNANSWERED],
        errors=dict(Counter(each.error for each in counted if each.outcome == FAILED)),
        hit_rate=_share(sum(each.cached_tokens for each in begun), prompt_tokens),
        first_token_s=first_token_s,
        first_token_at_least=at_least,
        seconds_per_token=spread([each.seconds_per_token for each in begun if each.seconds_per_token is not None]),
        answers_per_s=answers / window.seconds,
        prompt_tokens_per_s=prompts / window.seconds,
        output_tokens_per_s=output / window.seconds,
        tokens_per_s=(prompts + output) / window.seconds,
        predicted_equal=_share(sum(each.predicted_tokens == each.cached_tokens for each in begun), len(begun)),
        predicted_less=_share(sum(each.predicted_tokens < each.cached_tokens for each in begun), len(begun)),
        predicted_more=_share(sum(each.predicted_tokens > each.cached_tokens for each in begun), len(begun)),
        workers=len(by_worker),
        busiest=_share(max(by_worker.values(), default=0), len(begun)),
        lag_s=spread([each.lag_s for each in counted]),
    )


def shown_first_token(run: Mapping[str, Any], rank: str) -> str:
    """A figure of the time to first token: `0.25 s`, `> 4.00 s` where it is at least that, `-` where nobody got one."""
    if run["first_token_s"] is None:
        return "-"
    return f"{'> ' * (rank in run['first_token_at_least'])}{run['first_token_s'][rank]:.2f} s"


def _first_tokens(samples: Sequence[Sample]) -> tuple[Spread | None, tuple[str, ...]]:
    """The times to first tokens, and which figures of them are too little."""
    got = [each.first_token_s for each in samples if each.first_token_s is not None]
    given_up = [each.waited_s for each in samples if each.first_token_s is None and each.outcome == UNANSWERED]
    if not got:
        return None, ()
    found = spread([*got, *given_up])
    if not given_up:
        return found, ()
    # From the first of those who were given up on, any value might come later than where it stands.
    known, count = sum(each <= min(given_up) for each in got), len(got) + len(given_up)
    ranks = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    return found, ("mean", *(name for name, percent in ranks.items() if math.ceil(place_of(count, percent)) >= known))


def _began_in(sample: Sample, window: Window) -> bool:
    return sample.first_token_s is not None and window.has(sample.sent_s + sample.first_token_s)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
