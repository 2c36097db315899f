"""From what a broker told before and after to figures. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INDEX_COLUMNS: Final = ("part", "in scripts", "server's CPU", "client p50", "p90", "p99", "tokens/s per core")
MOST_SERVER_US: Final = 1000.0
"""The aim: a decision (match, score, submit) takes so long in the broker, at most."""
MOST_CLIENT_MS: Final = 2.0
"""And at its gateway."""
LEAST_TOKENS: Final = 100_000.0
"""The aim: tokens that one core of the broker commits in a second, at least."""
AIM_LOAD: Final = {"workers": 100, "prompt_tokens": 8192, "blocks": 512, "held_besides": 2048, "step_tokens": 32}
"""What the aims are for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server says it has spent since it started."""

    script_s: float
    """In scripts."""
    cpu_s: float
    """Processor time of all it does."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the work. Times are those of one call: in the broker in microseconds, at its client in
    milliseconds."""

    name: str
    calls: int
    """That were measured. A call may be several of a script."""
    script_us: float
    cpu_us: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    tokens_per_cpu_s: float | None
    """That one core of the broker would commit; None for what commits none."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def part(name: str, readings: Sequence[Reading], waited: Sequence[float], tokens: int = 0) -> Part:
    """`waited`: seconds of each call at its client, `tokens` what each of them brought. Between any two readings there
    are as many calls, but for the last two."""
    calls = len(waited)
    each = -(-calls // (len(readings) - 1))
    sizes = [min(each, calls - begun) for begun in range(0, calls, each)]
    rounds = list(zip(readings, readings[1:], sizes, strict=False))
    script = median((after.script_s - before.script_s) / size for before, after, size in rounds)
    cpu = median((after.cpu_s - before.cpu_s) / size for before, after, size in rounds)
    return Part(
        name=name,
        calls=calls,
        script_us=script * 1e6,
        cpu_us=cpu * 1e6,
        p50_ms=percentile(waited, 50) * 1000,
        p90_ms=percentile(waited, 90) * 1000,
        p99_ms=percentile(waited, 99) * 1000,
        tokens_per_cpu_s=tokens / cpu if tokens and cpu > 0 else None,
    )


def index_cells(told: dict[str, Any]) -> tuple[Any, ...]:
    """A part's line of the table."""
    rate = told["tokens_per_cpu_s"]
    return (
        told["name"],
        f"{told['script_us']:.0f} us",
        f"{told['cpu_us']:.0f} us",
        *(f"{told[rank]:.2f} ms" for rank in ("p50_ms", "p90_ms", "p99_ms")),
        "-" if rate is None else f"{rate:,.0f}",
    )


def told_load(load: Mapping[str, Any]) -> str:
    """In words."""
    return (
        f"{load['workers']} workers with {load['held_besides']} blocks each beside the prompt's, prompts of "
        f"{load['prompt_tokens']} tokens in {load['blocks']} blocks, steps of {load['step_tokens']} tokens"
    )


def told_aims(results: Mapping[str, Any]) -> str:
    """The load that the aims are for; each aim and what was measured, and, under that load, whether it is reached."""
    parts: Sequence[dict[str, Any]] = results["parts"]
    there = all(results[name] == value for name, value in AIM_LOAD.items())
    by_name = {told["name"]: told for told in parts}
    decision = by_name["a gateway's decision"]
    slowest = min(told["tokens_per_cpu_s"] for told in parts if told["tokens_per_cpu_s"] is not None)
    aims = (
        ("a decision in scripts", f"{decision['script_us']:.0f} us", "at most", f"{MOST_SERVER_US:.0f} us",
         decision["script_us"] <= MOST_SERVER_US),
        ("a decision at its gateway, p50", f"{decision['p50_ms']:.2f} ms", "at most", f"{MOST_CLIENT_MS:g} ms",
         decision["p50_ms"] <= MOST_CLIENT_MS),
        ("tokens/s per core", f"{slowest:,.0f}", "at least", f"{LEAST_TOKENS:,.0f}", slowest >= LEAST_TOKENS),
    )  # fmt: skip
    lines = [f"The aims are for {told_load(AIM_LOAD)}, one call after the other."]
    if not there:
        lines.append(f"This was another load, of which they say nothing: {told_load(results)}.")
    lines += [
        f"{what}: {found}, aim {bound} {aim}" + there * f": {'reached' if reached else 'missed'}"
        for what, found, bound, aim, reached in aims
    ]
    return "\n".join(lines)
