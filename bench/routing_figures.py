"""From samples of runs to what is told of policies. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.stats import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ANSWERED: Final = "answered"
REFUSED: Final = "refused"
"""RESOURCE_EXHAUSTED: the queues are full."""
UNANSWERED: Final = "unanswered"
"""Given up by the client after the run's end."""
FAILED: Final = "failed"

OURS: Final = "prefix"
THEIRS: Final = "least-loaded"
AIM_RATIO: Final = 2.0
"""Working set over pool at which the aims for TTFT and throughput count."""
AIM_FIRST_TOKEN: Final = 1 / 3
AIM_THROUGHPUT: Final = 1.5
AIM_WORSE: Final = 0.05
"""By so much may a figure be worse than least-loaded's anywhere."""
_ALL: Final = "; both answered all that came"


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
    """Who was given up before its first token counts with the time that it had waited, which is too little."""
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
    return Figures(
        requests=len(counted),
        answered=outcomes[ANSWERED],
        refused=outcomes[REFUSED],
        unanswered=outcomes[UNANSWERED],
        errors=dict(Counter(each.error for each in counted if each.outcome == FAILED)),
        hit_rate=_share(sum(each.cached_tokens for each in begun), prompt_tokens),
        first_token_s=spread([*_first_tokens(counted)]),
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


def versus(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prefix against least-loaded, for every load that both have run: TTFT p90 and throughput, as ratios. Where both
    have answered all that came (`all_answered`), throughput is what came, and tells nothing of them."""
    found = {(run["scenario"], run["load"], run["policy"]): run for run in runs}
    ratios = []
    for (name, load, policy), ours in found.items():
        theirs = found.get((name, load, THEIRS))
        if policy != OURS or theirs is None:
            continue
        ratios.append(
            {
                "scenario": name,
                "load": load,
                "first_token_p90": _over(_p90(ours), _p90(theirs)),
                "tokens_per_s": _over(ours["tokens_per_s"], theirs["tokens_per_s"]),
                "all_answered": all(run["answered"] == run["requests"] for run in (ours, theirs)),
            }
        )
    return ratios


def told_aims(ratios: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has an aim, in sentences; none without both policies."""
    told = [
        f"Where the working set is {AIM_RATIO:g} pools, at load {each['load']:g}: TTFT p90 is "
        f"{_times(each['first_token_p90'])} of least-loaded's (the aim is at most {AIM_FIRST_TOKEN:.2f}), throughput "
        f"{_times(each['tokens_per_s'])} (at least {AIM_THROUGHPUT:g}{_ALL if each['all_answered'] else ''})."
        for each in ratios
        if each["scenario"] == f"ratio {AIM_RATIO:g}"
    ]
    slower = [each for each in ratios if each["first_token_p90"] is not None]
    if slower:
        worst = max(slower, key=lambda each: float(each["first_token_p90"]))
        told.append(
            f"Against least-loaded, TTFT p90 is at worst {_times(worst['first_token_p90'])} ({_where(worst)}; the aim "
            f"is at most {1 + AIM_WORSE:.2f})."
        )
    fewer = [each for each in ratios if each["tokens_per_s"] is not None and not each["all_answered"]]
    if fewer:
        worst = min(fewer, key=lambda each: float(each["tokens_per_s"]))
        told.append(
            f"Where not all was answered, throughput is at worst {_times(worst['tokens_per_s'])} of least-loaded's "
            f"({_where(worst)}; the aim is at least {1 - AIM_WORSE:.2f})."
        )
    return told


def told_lag(runs: Iterable[Mapping[str, Any]]) -> str:
    """How late the load generator was, at worst."""
    late = [run for run in runs if run["lag_s"] is not None]
    if not late:
        return "Nothing was sent."
    worst = max(late, key=lambda run: float(run["lag_s"]["p99"]))
    busiest = max(late, key=lambda run: float(run["client_cpu"]))
    return (
        f"The load generator sent at most {1000 * worst['lag_s']['p99']:.1f} ms late (p99 of the worst run: "
        f"{worst['policy']}, {_where(worst)}; its latest {1000 * worst['lag_s']['max']:.1f} ms) and took at most "
        f"{busiest['client_cpu']:.0%} of a core."
    )


def _first_tokens(samples: Iterable[Sample]) -> Iterator[float]:
    for each in samples:
        if each.first_token_s is not None:
            yield each.first_token_s
        elif each.outcome == UNANSWERED:
            yield each.waited_s


def _began_in(sample: Sample, window: Window) -> bool:
    return sample.first_token_s is not None and window.has(sample.sent_s + sample.first_token_s)


def _p90(run: Mapping[str, Any]) -> float | None:
    return None if run["first_token_s"] is None else float(run["first_token_s"]["p90"])


def _over(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _where(each: Mapping[str, Any]) -> str:
    return f"{each['scenario']}, load {each['load']:g}"
