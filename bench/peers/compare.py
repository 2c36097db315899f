"""All engines in turn over the same prompts: rounds, medians, ratios to ours, agreement with float32."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.machine import describe_machine
from bench.offline import Answer, BadAnswerError, agreement, rate, ratios, summary
from bench.peers.catalog import OURS, Variant
from bench.peers.process import PeerFailed, PeerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.offline import Load, Prompts

LOAD_S: Final = 1800.0
"""Limit for loading a model; some compile first."""
REFERENCE_S: Final = 1800.0
COMPARED: Final = 8
"""First tokens that are compared with float32's."""
CHILD: Final = Path(__file__).parent / "child"


@dataclass(frozen=True, slots=True)
class Prepared:
    """How a variant's process is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    """Its first message."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a comparison does."""

    variants: Sequence[Variant]
    """Ours first; ratios are to that."""
    loads: Sequence[Load]
    rounds: int
    seed: int
    vocab_size: int
    turn_s: float
    """Limit of one workload, once."""
    logs: Path


@dataclass(slots=True)
class Found:
    """What is known of a variant."""

    versions: dict[str, str] = field(default_factory=dict)
    rates: dict[str, list[float | None]] = field(default_factory=dict)
    """Tokens per second by workload; None for a round that it did not do."""
    begun: list[list[int]] = field(default_factory=list)
    """The first `COMPARED` tokens of each answer to the workload that is compared."""
    failed: str = ""


def compare(
    plan: Plan, prepare: Callable[[Variant], Prepared], reference: Prepared, note: Callable[[str], None]
) -> dict[str, Any]:
    """Runs everything and returns what goes into the file. A peer that fails is told with its reason."""
    found = {variant.name: Found(rates={load.name: [] for load in plan.loads}) for variant in plan.variants}
    with ExitStack() as stack:
        running: dict[str, PeerProcess] = {}
        for variant in plan.variants:
            note(f"{variant.name}: loading")
            try:
                running[variant.name] = _started(
                    stack, prepare(variant), plan.logs / f"{variant.name}.log", found[variant.name]
                )
            except PeerFailed as reason:
                _fail(found[variant.name], variant.name, reason, note)
        for turn in range(plan.rounds + 1):
            for load in plan.loads:
                prompts = load.prompts(turn, plan.vocab_size, plan.seed)
                for name in _order(running, turn):
                    _turn(plan, load, prompts, turn, running, name, found[name], note)
    theirs, failure = _reference(plan, reference, note)
    return results(plan, found, theirs, failure)


def _started(stack: ExitStack, prepared: Prepared, log: Path, found: Found) -> PeerProcess:
    process = stack.enter_context(PeerProcess(prepared.command, prepared.environment, log))
    try:
        found.versions = process.ask(prepared.settings, LOAD_S)["versions"]
    except PeerFailed:
        process.close()
        raise
    return process


def _turn(
    plan: Plan,
    load: Load,
    prompts: Prompts,
    turn: int,
    running: dict[str, PeerProcess],
    name: str,
    found: Found,
    note: Callable[[str], None],
) -> None:
    """One workload of one engine, once. The first turn only warms up."""
    try:
        wish = {"prompts": prompts, "new": load.new, "decoding": load.decoding}
        measured, begun = read_turn(load, running[name].ask(wish, plan.turn_s))
    except (PeerFailed, BadAnswerError) as reason:
        _fail(found, name, PeerFailed(f"{load.name}, round {turn}: {reason}"), note)
        running.pop(name).close()
        return
    if turn == 0 or measured is None:
        return
    found.rates[load.name] += [None] * (turn - 1 - len(found.rates[load.name])) + [measured]
    if load is plan.loads[0]:
        found.begun += begun
    note(f"round {turn}, {load.name}, {name}: {measured:,.0f} tokens/s")


def _fail(found: Found, name: str, reason: PeerFailed, note: Callable[[str], None]) -> None:
    found.failed = str(reason)
    note(f"{name} failed: {reason}")


def _order(running: Mapping[str, PeerProcess], turn: int) -> list[str]:
    """Each turn begins with another one."""
    names = list(running)
    first = turn % max(1, len(names))
    return names[first:] + names[:first]


def _reference(plan: Plan, prepared: Prepared, note: Callable[[str], None]) -> tuple[list[list[int]], str]:
    """How float32 begins the answers to the first workload, in all rounds; or why that is not known."""
    load = plan.loads[0]
    begun: list[list[int]] = []
    note(f"float32: the first {COMPARED} tokens of {load.name}")
    try:
        with ExitStack() as stack:
            process = _started(stack, prepared, plan.logs / "float32.log", Found())
            for turn in range(1, plan.rounds + 1):
                prompts = load.prompts(turn, plan.vocab_size, plan.seed)
                said = process.ask({"prompts": prompts, "new": min(COMPARED, load.new)}, REFERENCE_S)
                begun += read_answer(said).tokens
    except (PeerFailed, BadAnswerError) as reason:
        return [], str(reason)
    return begun, ""


def read_turn(load: Load, message: Mapping[str, Any]) -> tuple[float | None, list[list[int]]]:
    """The rate of one turn, and how its answers begin. A tool may tell the rate alone, or that it can't do this.

    Raises:
        BadAnswerError: it is not what was asked for.
    """
    if "rate" in message:
        told = message["rate"]
        if told is not None and not (isinstance(told, int | float) and told > 0):
            raise BadAnswerError(f"{told!r} is no rate")
        return told, []
    answer = read_answer(message)
    answer.check(load)
    return rate(load, answer), [tokens[:COMPARED] for tokens in answer.tokens]


def read_answer(message: Mapping[str, Any]) -> Answer:
    """Raises BadAnswerError for a message that has no tokens and times."""
    tokens, times = message.get("tokens"), message.get("times")
    if not (_are_lists(tokens, int) and _are_lists(times, int | float)):
        raise BadAnswerError("the answer is not lists of token ids and of times")
    assert tokens is not None
    assert times is not None
    return Answer(tokens, times)


def _are_lists(value: object, kind: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and all(isinstance(number, kind) for number in each) for each in value
    )


def results(plan: Plan, found: Mapping[str, Found], theirs: Sequence[Sequence[int]], failure: str) -> dict[str, Any]:
    """For JSON: by variant its figures and our ratio to them, and how we stand to the best."""
    ours = found[plan.variants[0].name]
    return {
        "machine": describe_machine(),
        "rounds": plan.rounds,
        "seed": plan.seed,
        "workloads": [asdict(load) for load in plan.loads],
        "compared": {"workload": plan.loads[0].name, "tokens": COMPARED, "failed": failure},
        "engines": [_engine(plan, variant, found[variant.name], ours, theirs) for variant in plan.variants],
        "best": {
            kind: {load.name: standing(plan, found, load.name, full=kind == "bf16") for load in plan.loads}
            for kind in ("bf16", "any")
        },
    }


def _engine(plan: Plan, variant: Variant, found: Found, ours: Found, theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    padded = {name: _padded(rates, plan.rounds) for name, rates in found.rates.items()}
    whole = bool(theirs) and len(found.begun) == len(theirs)
    return {
        "name": variant.name,
        "versions": found.versions,
        "failed": found.failed,
        "agreement": agreement(found.begun, theirs) if whole else None,
        "workloads": {
            name: {
                "tokens_per_s": rates,
                **(summary([each for each in rates if each is not None]) if any(rates) else {}),
                "ours_to_this": ratios(_padded(ours.rates[name], plan.rounds), rates),
            }
            for name, rates in padded.items()
        },
    }


def standing(plan: Plan, found: Mapping[str, Found], load: str, *, full: bool) -> dict[str, Any] | None:
    """Our best mode's median over the best peer's; of bfloat16 weights alone with `full`. None without both."""
    medians: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for variant in plan.variants:
        rates = [each for each in found[variant.name].rates[load] if each is not None]
        if rates and (variant.full or not full):
            medians[variant.peer.name == OURS][variant.name] = summary(rates)["median"]
    if not (medians[True] and medians[False]):
        return None
    mine, peer = (max(each, key=lambda name: each[name]) for each in (medians[True], medians[False]))
    return {"ours": mine, "peer": peer, "ratio": medians[True][mine] / medians[False][peer]}


def _padded(rates: Sequence[float | None], rounds: int) -> list[float | None]:
    return [*rates, *[None] * (rounds - len(rates))]


def command(environment: Path, script: str) -> tuple[str, ...]:
    """How a child is started; without its folder in the way of libraries (-P)."""
    return (str(environment / "bin" / "python"), "-P", str(CHILD / "main.py"), f"{script}.py")


def ours(script: str) -> tuple[str, ...]:
    """The same in our own environment."""
    return (sys.executable, "-P", str(CHILD / "main.py"), f"{script}.py")
