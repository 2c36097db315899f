"""Where a job goes: a pure function of what is known, so that a decision can be explained, and replayed later.

============  ==========================================================================================================
policy        the job goes to
============  ==========================================================================================================
prefix        the least cost in seconds (``gateway.cost``): cached prefixes, queues, rates and decoding weighed together
least-loaded  the fewest tokens charged, every answer at its maximum
round-robin   the next worker by id
random        any
============  ==========================================================================================================

Ties are broken at random. So that several gateways, which see the same loads, do not all take the same one, what is
within a thousandth of the least cost is tied: less than what a prefix saves that is worth anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.cost import Candidate, Cost, Work, costs_of, takers

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

__all__ = ["Candidate", "Considered", "Decision", "Policy", "Work", "route"]

TIE: Final = 1.001


class Policy(StrEnum):
    """How workers are chosen."""

    PREFIX = "prefix"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class Considered(NamedTuple):
    """A candidate as it was judged. `verdict`: chosen, tied, costlier, not its turn, not drawn, or why not at all."""

    candidate: Candidate
    cost: Cost
    verdict: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice, and every candidate with its reason. `chosen` is None when no candidate takes jobs."""

    work: Work
    policy: Policy
    chosen: Considered | None
    considered: tuple[Considered, ...]


def route(
    candidates: Sequence[Candidate],
    work: Work,
    *,
    policy: Policy,
    refused: Mapping[str, str],
    rng: random.Random,
    last: str = "",
) -> Decision:
    """Decides among ready candidates.

    `refused`: incarnation to reason, for workers that can't take this job. `last`: the worker that was chosen before
    this, for round-robin.
    """
    costs = costs_of(work, candidates, refused)
    able = takers(candidates, refused)
    verdicts = [refused.get(each.incarnation, f"is {each.state}") for each in candidates]
    if not able:
        return Decision(work, policy, None, tuple(map(Considered, candidates, costs, verdicts)))
    best = _best(able, candidates, costs, policy, last)
    winner = rng.choice(best)
    lost = "not its turn" if policy is Policy.ROUND_ROBIN else "costlier"
    for at in able:
        verdicts[at] = lost
    for at in best:
        verdicts[at] = "not drawn" if policy is Policy.RANDOM else "tied"
    verdicts[winner] = "chosen"
    considered = tuple(map(Considered, candidates, costs, verdicts))
    return Decision(work, policy, considered[winner], considered)


def _best(
    able: Sequence[int], candidates: Sequence[Candidate], costs: Sequence[Cost], policy: Policy, last: str
) -> list[int]:
    """Of the candidates at these places, one or more: those between which nothing but chance decides."""
    if policy is Policy.RANDOM:
        return list(able)
    if policy is Policy.ROUND_ROBIN:
        # Those after the last one come before the others.
        return [min(able, key=lambda at: (candidates[at].worker <= last, candidates[at].worker))]
    if policy is Policy.LEAST_LOADED:
        tokens = [candidates[at].load.tokens for at in able]
        least = min(tokens)
        return [at for at, own in zip(able, tokens, strict=True) if own == least]
    totals = [costs[at].total_s for at in able]
    limit = TIE * min(totals)
    return [at for at, total_s in zip(able, totals, strict=True) if total_s <= limit]
