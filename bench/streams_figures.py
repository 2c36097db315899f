"""From what was committed and what arrived to figures of `octavo bench streams`. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bench.stats import spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Marks = Sequence[tuple[float, int]]

STREAM_COLUMNS: Final = (
    *("streams", "tokens", "tokens/s", "added p50", "p90", "p99", "worst", "first token p50", "p99"),
    *("gateway, per token", "gateway, per stream"),
)


@dataclass(slots=True)
class Told:
    """One stream, as its client saw it. Seconds by this machine's clock."""

    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When something came, and how many tokens (by HTTP: characters) there were then."""
    output: list[int] | str = ""
    """Its token ids; by HTTP, its text."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """The same stream, as its token log has it."""

    committed: list[tuple[float, int]]
    """When something was committed, and how many tokens (characters) there were then. By HTTP without the tokens that
    have no text, such as the model's end token: nothing arrives for these."""
    output: list[int] | str
    tokens: int


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the gateway's process took."""

    cpu_s: float
    """While all streams were open."""
    before: int
    """Bytes of memory before the first stream."""
    open: int
    """With all of them open: the most that was seen."""


def added(committed: Marks, arrivals: Marks, window: tuple[float, float]) -> list[float]:
    """For each commit in the window: seconds until all of it had arrived. What never did is left out."""
    times, place = [], 0
    for moment, count in committed:
        while place < len(arrivals) and arrivals[place][1] < count:
            place += 1
        if place < len(arrivals) and window[0] <= moment < window[1]:
            times.append(arrivals[place][0] - moment)
    return times


def window_of(told: Sequence[Told]) -> tuple[float, float]:
    """While all streams were open: from the last one's first token to the first one's last. Empty when some stream
    brought nothing."""
    if not all(each.arrivals for each in told):
        return (0.0, 0.0)
    return max(each.arrivals[0][0] for each in told), min(each.arrivals[-1][0] for each in told)


def wrong(told: Sequence[Told], kept: Sequence[Kept], expected: Sequence[Kept] | None, size: int) -> dict[str, int]:
    """What is wrong with how many streams: each must bring what its log has, `size` tokens of it, and what the same
    prompt brought before (`expected`)."""
    found: dict[str, int] = {}
    for index, (mine, log) in enumerate(zip(told, kept, strict=True)):
        if mine.error:
            reason = mine.error
        elif mine.output != log.output:
            reason = "other tokens than its log has"
        elif log.tokens != size:
            reason = f"{log.tokens} tokens"
        elif expected is not None and log.output != expected[index].output:
            reason = "other tokens than the same prompt brought before"
        else:
            continue
        found[reason] = found.get(reason, 0) + 1
    return found


def figures(told: Sequence[Told], kept: Sequence[Kept], gateway: Gateway) -> dict[str, Any]:
    """Of one load. Times in seconds, memory in bytes."""
    window = window_of(told)
    times = [each for mine, log in zip(told, kept, strict=True) for each in added(log.committed, mine.arrivals, window)]
    seconds = window[1] - window[0]
    late, first = spread(times), spread([each.arrivals[0][0] - each.sent for each in told if each.arrivals])
    return {
        "streams": len(told),
        "all_open_s": seconds,
        "tokens": len(times),
        "tokens_per_s": len(times) / seconds if seconds > 0 else None,
        "added_s": {name: getattr(late, name) for name in ("mean", "p50", "p90", "p99", "max")} if late else None,
        "first_token_s": {name: getattr(first, name) for name in ("p50", "p99", "max")} if first else None,
        "gateway_cpu_s_per_token": gateway.cpu_s / len(times) if times else None,
        "gateway_bytes_before": gateway.before,
        "gateway_bytes_open": gateway.open,
        "gateway_bytes_per_stream": (gateway.open - gateway.before) / len(told),
    }


def stream_cells(name: str, load: Mapping[str, Any]) -> tuple[str, ...]:
    """A load's line of the table."""
    late, first = load["added_s"], load["first_token_s"]
    if late is None or first is None:
        return (name, *("-" for _ in STREAM_COLUMNS[1:]))
    return (
        name,
        f"{load['tokens']:,}",
        f"{load['tokens_per_s']:,.0f}",
        *(f"{late[rank] * 1000:.1f} ms" for rank in ("p50", "p90", "p99", "max")),
        *(f"{first[rank] * 1000:.0f} ms" for rank in ("p50", "p99")),
        f"{load['gateway_cpu_s_per_token'] * 1e6:.0f} us",
        f"{load['gateway_bytes_per_stream'] / 1024:.0f} KB",
    )


def unexpected(answers: Mapping[str, Mapping[str, int]], expected: Mapping[str, str]) -> list[str]:
    """What troublemakers were told that they should not have been, or were never told."""
    found = [
        f"{kind}: {answer}, {count} times"
        for kind, counts in answers.items()
        for answer, count in counts.items()
        if answer != expected[kind]
    ]
    return found + [f"{kind}: never sent" for kind in expected if not answers.get(kind)]
