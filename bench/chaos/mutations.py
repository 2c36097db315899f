"""Small lies about a good run, each of which breaks one invariant and no other: they prove that the checker sees.

A mutation takes a run and a source of randomness, and gives the run with one lie in it, or None where there is no place
for that lie. It works on made-up runs and on real ones: a harness that proves itself on what it has just measured can't
have looked away.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bench.chaos import mutations_of_ends, mutations_of_remains, mutations_of_tokens
from bench.chaos.checker import check
from bench.chaos.history import LOAD
from bench.chaos.remains import PER_REQUEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.chaos.evidence import Rules, Run

    Change = Callable[[Run, random.Random], Run | None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One lie, and the invariant that it breaks."""

    name: str
    invariant: str
    apply: Change


MUTATIONS: Final = tuple(
    Mutation(change.__name__.replace("_", " "), invariant, change)
    for invariant, change in (*mutations_of_tokens.CHANGES, *mutations_of_ends.CHANGES, *mutations_of_remains.CHANGES)
)


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of one mutation: how often it could be tried, how often exactly its invariant was found broken."""

    mutation: str
    invariant: str
    tried: int
    caught: int
    missed: tuple[str, ...] = ()
    """For each that was not: the seed, and what was found instead."""

    @property
    def holds(self) -> bool:
        return self.caught == self.tried


def prove(run: Run, rules: Rules, *, seed: int, times: int = 5) -> list[Proof]:
    """Tries each mutation ``times`` on a run. What the run itself breaks already is not counted for a mutation."""
    before = set(check(run, rules))
    proofs = []
    for mutation in MUTATIONS:
        tried, missed = 0, []
        for attempt in range(times):
            changed = mutation.apply(run, random.Random(f"{seed}/{mutation.name}/{attempt}"))
            if changed is None:
                continue
            tried += 1
            broken = {each.invariant for each in set(check(changed, rules)) - before}
            if broken != {mutation.invariant}:
                missed.append(f"{seed}/{mutation.name}/{attempt}: {' '.join(sorted(broken)) or 'nothing'}")
        proofs.append(Proof(mutation.name, mutation.invariant, tried, tried - len(missed), tuple(missed)))
    return proofs


def table(proofs: list[Proof]) -> str:
    """For people."""
    width = max(len(proof.mutation) for proof in proofs)
    lines = [f"{'mutation':{width}}  breaks  tried  caught"]
    for proof in proofs:
        lines.append(f"{proof.mutation:{width}}  {proof.invariant:6}  {proof.tried:5}  {proof.caught:6}")
        lines += [f"    MISSED {miss}" for miss in proof.missed]
    return "\n".join(lines)


def good_part(run: Run, rules: Rules, *, seed: int, most: int = 150) -> Run:
    """Some of a run's requests that nothing was found about, with what they left: a place for mutations in a run that
    is not all good, and in one that is too long to be checked again for each of them."""
    about = {each.where.removeprefix("log of ").split(" ")[0] for each in check(run, rules)}
    names = [name for name in run.requests if name not in about]
    if len(names) > most:
        # Of each role some: most of a run is load. And some that the broker still knows, first those that another
        # worker took over: of a long run it has forgotten most.
        random.Random(f"part/{seed}").shuffle(names)
        rare = [name for name in names if run.requests[name].invoked.role != LOAD]
        known = [name for name in names if name in run.broker.logs]
        known.sort(key=lambda name: max((entry.attempt for entry in run.broker.logs[name]), default=0) < 2)
        names = list(dict.fromkeys((*rare[: most // 3], *known[: most // 3], *names)))[:most]
    kept = set(names)
    broker = replace(
        run.broker,
        jobs={name: job for name, job in run.broker.jobs.items() if name in kept},
        logs={name: log for name, log in run.broker.logs.items() if name in kept},
        keys={name: key for name, key in run.broker.keys.items() if name[4:] in kept or name[:4] not in PER_REQUEST},
    )
    return replace(run, requests={name: run.requests[name] for name in names}, broker=broker)
