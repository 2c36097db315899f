"""What was found of each engine, as figures for JSON, a table, and sentences. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bench.machine import describe_machine
from bench.offline import agreement, ratios, shown, summary
from bench.peers.catalog import OURS, Variant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.offline import Load

COMPARED: Final = 8
"""First tokens of an answer that are compared with float32's."""
SHORT: Final = 60
"""Characters of a reason in the table."""
Begun = dict[int, list[list[int]]]
"""How the answers to one workload begin, `COMPARED` tokens of each, by round (from 1)."""


@dataclass(slots=True)
class Found:
    """What is known of a variant."""

    versions: dict[str, str] = field(default_factory=dict)
    rates: dict[str, list[float | None]] = field(default_factory=dict)
    """Tokens per second by workload; None for a round that it did not do."""
    begun: Begun = field(default_factory=dict)
    """Of the workload that is compared."""
    failed: str = ""


@dataclass(slots=True)
class Reference:
    """What float32 says, or why that is not known."""

    begun: Begun = field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What was to be measured."""

    variants: Sequence[Variant]
    """Ours first; ratios are to that."""
    loads: Sequence[Load]
    """Answers to the first are compared with float32's."""
    rounds: int
    seed: int


def results(asked: Asked, found: Mapping[str, Found], reference: Reference, *, interrupted: bool) -> dict[str, Any]:
    """For JSON: by variant its figures and our ratio to them, and how we stand to the best."""
    ours = found[asked.variants[0].name]
    return {
        "machine": describe_machine(),
        "rounds": asked.rounds,
        "interrupted": interrupted,
        "seed": asked.seed,
        "workloads": [asdict(load) for load in asked.loads],
        "compared": {"workload": asked.loads[0].name, "tokens": COMPARED, "failed": reference.failed},
        "engines": [_engine(asked, variant, found[variant.name], ours, reference) for variant in asked.variants],
        "best": {
            kind: {load.name: standing(asked, found, load.name, full=kind == "bf16") for load in asked.loads}
            for kind in ("bf16", "any")
        },
    }


def _engine(asked: Asked, variant: Variant, found: Found, ours: Found, reference: Reference) -> dict[str, Any]:
    padded = {name: _padded(rates, asked.rounds) for name, rates in found.rates.items()}
    turns = sorted(found.begun.keys() & reference.begun.keys())
    mine, theirs = ([each for turn in turns for each in begun[turn]] for begun in (found.begun, reference.begun))
    return {
        "name": variant.name,
        "versions": found.versions,
        "failed": found.failed,
        "agreement": agreement(mine, theirs) if mine else None,
        "answers_compared": len(mine),
        "workloads": {
            name: {
                "tokens_per_s": rates,
                **(summary([each for each in rates if each is not None]) if any(rates) else {}),
                "ours_to_this": ratios(_padded(ours.rates[name], asked.rounds), rates),
            }
            for name, rates in padded.items()
        },
    }


def standing(asked: Asked, found: Mapping[str, Found], load: str, *, full: bool) -> dict[str, Any] | None:
    """Our best mode's median over the best peer's; of bfloat16 weights alone with `full`. None without both."""
    medians: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for variant in asked.variants:
        rates = [each for each in found[variant.name].rates[load] if each is not None]
        if rates and (variant.full or not full):
            medians[variant.peer.name == OURS][variant.name] = summary(rates)["median"]
    if not (medians[True] and medians[False]):
        return None
    mine, peer = (max(each, key=lambda name: each[name]) for each in (medians[True], medians[False]))
    return {"ours": mine, "peer": peer, "ratio": medians[True][mine] / medians[False][peer]}


def _padded(rates: Sequence[float | None], rounds: int) -> list[float | None]:
    return [*rates, *[None] * (rounds - len(rates))]


def table(measured: dict[str, Any]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    """Columns and rows: tokens/s (medians) with ours over theirs, agreement with float32, why one failed."""
    loads = [load["name"] for load in measured["workloads"]]
    failures = any(engine["failed"] for engine in measured["engines"])
    rows: list[Sequence[Any]] = []
    for engine in measured["engines"]:
        cells: list[str] = []
        for load in loads:
            found = engine["workloads"][load]
            ratio = found["ours_to_this"]
            cells += [shown(found.get("median")), shown(ratio["median"] if ratio else None, 2)]
        agreed = "-" if engine["agreement"] is None else f"{engine['agreement']:.0%}"
        reason = [short(engine["failed"])] if failures else []
        rows.append((engine["name"], *cells, agreed, *reason))
    columns = ("engine", *(cell for load in loads for cell in (load, "ours/it")), "as float32")
    return (*columns, "failed") if failures else columns, rows


def short(reason: str) -> str:
    """A reason's first line, or its beginning."""
    line = reason.partition("\n")[0]
    return line if len(line) <= SHORT else f"{line[: SHORT - 3]}..."


def told(measured: dict[str, Any]) -> list[str]:
    """How we stand to the best peer, and which failed, in sentences."""
    lines = []
    for kind, name in (("bf16", "bfloat16 weights"), ("any", "any mode")):
        for load, best in measured["best"][kind].items():
            if best is not None:
                lines.append(f"{name}, {load}: {best['ours']} is {best['ratio']:.2f} times {best['peer']}")
    lines += [f"{engine['name']} failed: {engine['failed']}" for engine in measured["engines"] if engine["failed"]]
    if measured["compared"]["failed"]:
        lines.append(f"no agreement with float32: {measured['compared']['failed']}")
    if measured["interrupted"]:
        lines.append(f"interrupted: not all of {measured['rounds']} rounds were done")
    return lines
