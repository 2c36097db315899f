"""All engines in turn over the same prompts: rounds, and what each made of them."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.offline import Answer, BadAnswerError, rate
from bench.peers.process import PeerFailed, PeerProcess
from bench.peers.results import COMPARED, Asked, Found, Reference, results

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.offline import Load, Prompts
    from bench.peers.catalog import Variant

LOAD_S: Final = 1800.0
"""Limit for loading a model; some compile first."""
REFERENCE_S: Final = 1800.0
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

    asked: Asked
    vocab_size: int
    turn_s: float
    """Limit of one workload, once."""
    logs: Path

    def prompts(self, load: Load, turn: int) -> Prompts:
        return load.prompts(turn, self.vocab_size, self.asked.seed)


def compare(
    plan: Plan,
    prepare: Callable[[Variant], Prepared],
    reference: Prepared,
    note: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs everything and returns what goes into the file; what is known after each round goes to `keep`.

    A peer that fails is told with its reason. Ctrl-C (KeyboardInterrupt) ends it with what was measured until then.

    Raises:
        KeyboardInterrupt: nothing had been measured yet.
    """
    run = _Run(plan, note)
    try:
        run.ask_reference(reference)
        with ExitStack() as stack:
            run.load(stack, prepare)
            for turn in range(plan.asked.rounds + 1):
                run.round(turn)
                if turn:
                    keep(run.results(interrupted=turn < plan.asked.rounds))
    except KeyboardInterrupt:
        if not run.measured:
            raise
        note("interrupted; what was measured is kept")
        return run.results(interrupted=True)
    return run.results(interrupted=False)


@dataclass(slots=True)
class _Run:
    """A comparison under way."""

    plan: Plan
    note: Callable[[str], None]
    found: dict[str, Found] = field(init=False)
    reference: Reference = field(default_factory=Reference)
    running: dict[str, PeerProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        asked = self.plan.asked
        self.found = {each.name: Found(rates={load.name: [] for load in asked.loads}) for each in asked.variants}

    @property
    def measured(self) -> bool:
        return any(rates for found in self.found.values() for rates in found.rates.values())

    def results(self, *, interrupted: bool) -> dict[str, Any]:
        return results(self.plan.asked, self.found, self.reference, interrupted=interrupted)

    def ask_reference(self, prepared: Prepared) -> None:
        """How float32 begins the answers to the first workload, in all rounds; or why that is not known."""
        load = self.plan.asked.loads[0]
        self.note(f"float32: the first {COMPARED} tokens of {load.name}")
        begun: dict[int, list[list[int]]] = {}
        try:
            with ExitStack() as stack:
                process, _ = self._started(stack, prepared, "float32")
                for turn in range(1, self.plan.asked.rounds + 1):
                    wish = {"prompts": self.plan.prompts(load, turn), "new": min(COMPARED, load.new)}
                    begun[turn] = read_answer(process.ask(wish, REFERENCE_S, self._waiting("float32"))).tokens
        except (PeerFailed, BadAnswerError) as reason:
            self.note(f"float32 failed: {reason}")
            self.reference = Reference(failed=str(reason))
        else:
            self.reference = Reference(begun)

    def load(self, stack: ExitStack, prepare: Callable[[Variant], Prepared]) -> None:
        """Starts all, one after the other."""
        variants = self.plan.asked.variants
        for number, variant in enumerate(variants, 1):
            self.note(f"{variant.name}: loading ({number} of {len(variants)})")
            begin = time.monotonic()
            try:
                process, versions = self._started(stack, prepare(variant), variant.name)
            except PeerFailed as reason:
                self._fail(variant.name, str(reason))
                continue
            self.running[variant.name] = process
            self.found[variant.name].versions = versions
            self.note(f"{variant.name}: ready after {time.monotonic() - begin:.0f} s")

    def round(self, turn: int) -> None:
        """All workloads of all engines, once. Round 0 only warms up."""
        asked = self.plan.asked
        self.note(f"round {turn} of {asked.rounds}" if turn else "warm-up")
        begin = time.monotonic()
        for load in asked.loads:
            prompts = self.plan.prompts(load, turn)
            for name in self._order(turn):
                self._turn(load, prompts, turn, name)
        if turn == 0:
            took = time.monotonic() - begin
            whole = took * asked.rounds / 60
            self.note(f"warm-up took {took:.0f} s; {asked.rounds} rounds like it take {whole:.0f} min")

    def _order(self, turn: int) -> list[str]:
        """Each turn begins with another one."""
        names = list(self.running)
        first = turn % max(1, len(names))
        return names[first:] + names[:first]

    def _turn(self, load: Load, prompts: Prompts, turn: int, name: str) -> None:
        """One workload of one engine, once."""
        found = self.found[name]
        place = f"round {turn}, {load.name}, {name}" if turn else f"warm-up, {load.name}, {name}"
        wish = {"prompts": prompts, "new": load.new, "decoding": load.decoding}
        try:
            answer = self.running[name].ask(wish, self.plan.turn_s, self._waiting(place))
            measured, begun = read_turn(load, answer)
        except (PeerFailed, BadAnswerError) as reason:
            self._fail(name, f"{load.name}, round {turn}: {reason}")
            self.running.pop(name).close()
            return
        if measured is None:
            return
        if turn:
            found.rates[load.name] += [None] * (turn - 1 - len(found.rates[load.name])) + [measured]
            if load is self.plan.asked.loads[0] and begun:
                found.begun[turn] = begun
        self.note(f"{place}: {measured:,.0f} tokens/s")

    def _started(self, stack: ExitStack, prepared: Prepared, name: str) -> tuple[PeerProcess, dict[str, str]]:
        """Its process with the model loaded, and its versions."""
        log = self.plan.logs / f"{name}.log"
        process = stack.enter_context(PeerProcess(prepared.command, prepared.environment, log))
        try:
            versions: dict[str, str] = process.ask(prepared.settings, LOAD_S, self._waiting(name))["versions"]
        except PeerFailed:
            process.close()
            raise
        return process, versions

    def _waiting(self, name: str) -> Callable[[float], None]:
        return lambda seconds: self.note(f"{name}: no answer yet after {seconds:.0f} s")

    def _fail(self, name: str, reason: str) -> None:
        self.found[name].failed = reason
        self.note(f"{name} failed: {reason}")


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


def command(environment: Path, script: str) -> tuple[str, ...]:
    """How a child is started; without its folder in the way of libraries (-P)."""
    return (str(environment / "bin" / "python"), "-P", str(CHILD / "main.py"), f"{script}.py")


def ours(script: str) -> tuple[str, ...]:
    """The same in our own environment."""
    return (sys.executable, "-P", str(CHILD / "main.py"), f"{script}.py")
