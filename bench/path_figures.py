"""Where a token's time goes, from what the processes told before and after. Pure: no clock, no I/O.

A process tells sums and counts as Prometheus metrics; what lies between two readings is what was done meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Values = dict[str, float]
"""A reading: by name and labels, as they are exposed."""

MOST_EXTRA_MS: Final = 5.0
"""The aim: so much later than in one process may the first token come, at most."""
LEAST_RATIO: Final = 0.9
"""The aim: of the tokens that the engine makes in one process, the service brings this share, at least."""
ENGINE_PARTS: Final = ("schedule", "model", "sample", "detokenise")
FIRST_COLUMNS: Final = ("first token", "service", "in one process")
STREAM_COLUMNS: Final = ("part", "per token", "each time", "in one process, per token")
THREADS: Final = ("loop", "engine")
"""Of a worker, by name."""
CPU_COLUMNS: Final = ("processor time", "per token")


@dataclass(frozen=True, slots=True)
class Told:
    """What gateway and worker have told of the time between two readings."""

    gateway: Values
    worker: Values

    def part(self, process: str, part: str) -> tuple[float, float]:
        """Seconds of a part, and how often it was done."""
        return _summary(getattr(self, process), "octavo_part_seconds", f'{{part="{part}"}}')

    def call(self, process: str, call: str) -> tuple[float, float]:
        """Seconds for which a process waited for the broker in such calls, and how many there were. A kind of call that
        a process has never made is not told of."""
        values, labels = getattr(self, process), f'{{call="{call}"}}'
        told = f"octavo_broker_seconds_sum{labels}" in values
        return _summary(values, "octavo_broker_seconds", labels) if told else (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class First:
    """One request alone, by the service and by the engine in one process. Seconds."""

    told: Told
    first_token: float
    """As its client saw it."""
    prefill: float
    """From its claim to the end of the step that brought its first token."""
    engine_first_token: float
    engine_parts: Values
    """Of the step that brought it, in one process."""


@dataclass(frozen=True, slots=True)
class Streams:
    """One round of requests that are all sent at once, and the same requests in one process. Seconds."""

    told: Told
    tokens: int
    wall: float
    client_cpu: float
    broker_cpu: float
    engine_wall: float
    engine_parts: Values


def parse(exposition: str) -> Values:
    """A reading, from the text that a process serves. Raises ValueError on anything else."""
    lines = [line.rsplit(" ", 1) for line in exposition.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def since(before: Values, after: Values) -> Values:
    """What was added between two readings."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def first_parts(first: First) -> Values:
    """The way of one first token, in its order, in seconds. They add up to what its client saw.

    What was done for later tokens too counts as often as it was done: once is its mean. ``between`` is what remains: on
    the way from process to process through the broker, less what two of them did at the same time.
    """
    told = first.told
    submit = _each(told.call("gateway", "submit"))
    wait = _each(told.part("worker", "wait"))
    gateway, _ = _summary(told.gateway, "octavo_time_to_first_token_seconds")
    parts = {
        "check": _each(told.part("gateway", "check")),
        "tokenize": _each(told.part("gateway", "tokenize")),
        "route": _each(told.part("gateway", "send")) - submit,
        "submit": submit,
        "claim": _each(told.call("worker", "claim")),
        "wait": wait,
        "step": first.prefill - wait,
        "take": _each(told.part("worker", "take")),
        "record": _each(told.part("worker", "record")),
        "commit": _each(told.call("worker", "commit")),
        "relay": _each(told.part("gateway", "relay")),
        "log read": told.call("gateway", "xrange")[0],
    }
    parts["between"] = gateway - sum(parts.values())
    parts["client"] = first.first_token - gateway
    return parts


def first_figures(samples: Sequence[First]) -> dict[str, Any]:
    """Medians over requests, in milliseconds."""
    by_request = [first_parts(sample) for sample in samples]
    service = _median(1000 * sample.first_token for sample in samples)
    engine = _median(1000 * sample.engine_first_token for sample in samples)
    return {
        "requests": len(samples),
        "parts_ms": {name: _median(1000 * parts[name] for parts in by_request) for name in by_request[0]},
        "engine_parts_ms": {
            name: _median(1000 * sample.engine_parts[name] for sample in samples) for name in ENGINE_PARTS
        },
        "service_ms": service,
        "engine_ms": engine,
        "extra_ms": _median(1000 * (sample.first_token - sample.engine_first_token) for sample in samples),
        "least_extra_ms": 1000 * min(sample.first_token - sample.engine_first_token for sample in samples),
        "aim_ms": MOST_EXTRA_MS,
    }


def stream_parts(streams: Streams) -> dict[str, tuple[float, float]]:
    """Seconds of each part in a round, and how often it was done. They overlap, in one process and between them."""
    told = streams.told
    send, sent = told.part("gateway", "send")
    submit, submits = told.call("gateway", "submit")
    return {
        "check": told.part("gateway", "check"),
        "tokenize": told.part("gateway", "tokenize"),
        "route": (send - submit, sent),
        "submit": (submit, submits),
        "claim": told.call("worker", "claim"),
        "wait": told.part("worker", "wait"),
        "step": _summary(told.worker, "octavo_step_seconds"),
        "take": told.part("worker", "take"),
        "record": told.part("worker", "record"),
        "commit": told.call("worker", "commit"),
        "relay": told.part("gateway", "relay"),
        "log read": told.call("gateway", "xrange"),
    }


def cpu_parts(streams: Streams) -> Values:
    """Processor seconds of a round, by process; of the worker also by thread."""
    told = streams.told
    loop, engine = (told.worker.get(f'octavo_thread_seconds_total{{thread="{name}"}}', 0.0) for name in THREADS)
    worker = told.worker.get("process_cpu_seconds_total", 0.0)
    return {
        "gateway": told.gateway.get("process_cpu_seconds_total", 0.0),
        "broker": streams.broker_cpu,
        "worker's event loop": loop,
        "worker's engine thread": engine,
        "worker's other threads": worker - loop - engine,
        "client": streams.client_cpu,
    }


def stream_figures(rounds: Sequence[Streams], concurrency: int) -> dict[str, Any]:
    """Medians over rounds: microseconds for each token, milliseconds for each time that a part was done."""
    parts = [stream_parts(each) for each in rounds]
    cpu = [cpu_parts(each) for each in rounds]

    def per_token(seconds: Sequence[float]) -> float:
        return _median(1e6 * each / one.tokens for each, one in zip(seconds, rounds, strict=True))

    ratios = [one.engine_wall / one.wall for one in rounds]
    return {
        "concurrency": concurrency,
        "rounds": len(rounds),
        "tokens": rounds[0].tokens,
        "parts": {
            name: {
                "us_per_token": per_token([each[name][0] for each in parts]),
                "ms_each": _median(1000 * _each(each[name]) for each in parts),
            }
            for name in parts[0]
        },
        "cpu_us_per_token": {name: per_token([each[name] for each in cpu]) for name in cpu[0]},
        "engine_us_per_token": {
            name: per_token([one.engine_parts[name] for one in rounds]) for name in (*ENGINE_PARTS, "step")
        },
        "service_us_per_token": per_token([one.wall for one in rounds]),
        "engine_wall_us_per_token": per_token([one.engine_wall for one in rounds]),
        "service_tokens_per_s": _median(one.tokens / one.wall for one in rounds),
        "engine_tokens_per_s": _median(one.tokens / one.engine_wall for one in rounds),
        "ratio": _median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "aim": LEAST_RATIO,
    }


def first_rows(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table of the first token, in milliseconds."""
    engine = figures["engine_parts_ms"]
    rows: list[tuple[str, ...]] = []
    for name, value in figures["parts_ms"].items():
        rows.append((name, f"{value:.2f} ms", f"{sum(engine.values()):.2f} ms" if name == "step" else "-"))
        if name == "step":
            rows += [(f"  {part}", "-", f"{engine[part]:.2f} ms") for part in ENGINE_PARTS]
    return [*rows, ("in all", f"{figures['service_ms']:.2f} ms", f"{figures['engine_ms']:.2f} ms")]


def stream_rows(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table of the streams: microseconds per token, milliseconds each time."""
    engine = figures["engine_us_per_token"]
    rows: list[tuple[str, ...]] = []
    for name, part in figures["parts"].items():
        alone = f"{engine['step']:.1f} us" if name == "step" else "-"
        rows.append((name, f"{part['us_per_token']:.1f} us", f"{part['ms_each']:.2f} ms", alone))
        if name == "step":
            rows += [(f"  {inner}", "-", "-", f"{engine[inner]:.1f} us") for inner in ENGINE_PARTS]
    whole, alone = figures["service_us_per_token"], figures["engine_wall_us_per_token"]
    return [*rows, ("wall time", f"{whole:.1f} us", "-", f"{alone:.1f} us")]


def cpu_rows(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table of processor time."""
    return [(name, f"{value:.1f} us") for name, value in figures["cpu_us_per_token"].items()]


def told_aims(first: Mapping[str, Any], streams: Mapping[str, Any]) -> str:
    """Both figures that have an aim, in two sentences."""
    return (
        f"The first token comes {first['extra_ms']:.1f} ms later than in one process "
        f"(the least was {first['least_extra_ms']:.1f}; the aim is at most {first['aim_ms']:g}). "
        f"{streams['concurrency']} streams get {streams['service_tokens_per_s']:,.0f} tokens/s, "
        f"{streams['ratio']:.1%} of the {streams['engine_tokens_per_s']:,.0f} in one process "
        f"({streams['least_ratio']:.1%} to {streams['most_ratio']:.1%}; the aim is at least {streams['aim']:.0%})."
    )


def _summary(values: Values, name: str, labels: str = "") -> tuple[float, float]:
    """Sum and count of a summary or histogram. KeyError: the process has no such metric."""
    return values[f"{name}_sum{labels}"], values[f"{name}_count{labels}"]


def _each(summary: tuple[float, float]) -> float:
    seconds, count = summary
    return seconds / count if count else 0.0


def _median(values: Any) -> float:
    return percentile(list(values), 50)
