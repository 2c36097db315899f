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

from gateway.cost import Candidate, Cost, Work, costs_of
from kvstore.registry import READY

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

__all__ = ["READY", "Candidate", "Considered", "Decision", "Policy", "Work", "route"]

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
    found = zip(candidates, costs_of(work, candidates, refused), strict=True)
    costs = {each.incarnation: each_cost for each, each_cost in found}
    able = [each for each in candidates if each.state == READY and each.incarnation not in refused]
    best = {each.incarnation for each in _best(able, costs, policy, last)}
    winner = rng.choice([each for each in able if each.incarnation in best]) if best else None

    def verdict(each: Candidate) -> str:
        if each.incarnation in refused:
            return refused[each.incarnation]
        if each.state != READY:
            return f"is {each.state}"
        if winner is not None and each.incarnation == winner.incarnation:
            return "chosen"
        if policy is Policy.RANDOM:
            return "not drawn"
        if each.incarnation in best:
            return "tied"
        return "not its turn" if policy is Policy.ROUND_ROBIN else "costlier"

    considered = tuple(Considered(each, costs[each.incarnation], verdict(each)) for each in candidates)
    return Decision(work, policy, next((each for each in considered if each.verdict == "chosen"), None), considered)


def _best(able: Sequence[Candidate], costs: Mapping[str, Cost], policy: Policy, last: str) -> list[Candidate]:
    """Those between which nothing but chance decides."""
    if not able or policy is Policy.RANDOM:
        return list(able)
    if policy is Policy.ROUND_ROBIN:
        # Those after the last one come before the others.
        return [min(able, key=lambda each: (each.worker <= last, each.worker))]
    if policy is Policy.LEAST_LOADED:
        least = min(each.load.tokens for each in able)
        return [each for each in able if each.load.tokens == least]
    limit = TIE * min(costs[each.incarnation].total_s for each in able)
    return [each for each in able if costs[each.incarnation].total_s <= limit]
