"""Recorded decisions under another policy. Pure: no clock, no I/O.

Each decision is made again from what it was made from. What would have become of the fleet is not asked: the next
record's loads and caches are those that the recorded choices led to. So costs tell what a policy would rather have
done, one job at a time, and not how it would have fared.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from gateway.cost import Candidate, Cost, Rates, Work, cached
from gateway.router import Policy, route
from kvstore.registry import READY, Load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gateway.router import Considered, Decision
    from octavo.v1 import fleet_pb2

CONSIDERED: Final = ("chosen", "tied", "costlier", "not its turn", "not drawn")
"""Verdicts on workers that could have been chosen; any other tells why one could not."""
REPLAY_COLUMNS: Final = (
    *("made by", "again by", "decisions", "other choice", "cost made", "again"),
    *("until first token made", "again", "cached made", "again"),
)


@dataclass(frozen=True, slots=True)
class Choices:
    """What choices cost on average, in seconds, by today's cost function. `cached`: share of their prompts' tokens that
    was expected in caches."""

    cost_s: float
    first_token_s: float
    """Of it, what comes before the first token: waiting, the prompt's work, pages."""
    cached: float


@dataclass(frozen=True, slots=True)
class Replay:
    """Decisions that one policy made, made again by another."""

    recorded_policy: str
    policy: str
    decisions: int
    differ: float
    """Whose worker the other policy would not have chosen. Between equals it is no other choice; of random, which
    chooses between all, it is what is expected: (n-1)/n of each decision among n workers."""
    recorded: Choices
    replayed: Choices


def replay(records: Iterable[fleet_pb2.RouteRecord], policies: Sequence[Policy], seed: int = 0) -> list[Replay]:
    """All records under every policy, told by the policy that made them. Records without a choice are left out."""
    by_policy: dict[str, list[fleet_pb2.RouteRecord]] = defaultdict(list)
    for record in records:
        if record.chosen < len(record.candidates):
            by_policy[record.policy].append(record)
    return [_replay(found, made, policy, seed) for made, found in by_policy.items() for policy in policies]


def _replay(records: Sequence[fleet_pb2.RouteRecord], made: str, policy: Policy, seed: int) -> Replay:
    rng, last, differ = random.Random(seed), "", 0.0
    recorded: list[tuple[Cost, int]] = []
    replayed: list[tuple[Cost, int]] = []
    for record in records:
        work, candidates = work_of(record), [candidate_of(each) for each in record.candidates]
        refused = {each.incarnation: each.verdict for each in record.candidates if each.verdict not in CONSIDERED}
        decision = route(candidates, work, policy=policy, refused=refused, rng=rng, last=last)
        # The recorded choice could be chosen, so something is.
        assert decision.chosen is not None
        own, pick = decision.considered[record.chosen], decision.chosen
        last = pick.candidate.worker
        differ += _chance_of_other(decision, own)
        for choices, each in ((recorded, own), (replayed, pick)):
            choices.append((each.cost, cached(work, each.candidate)))
    prompts = sum(record.prompt_tokens for record in records)
    return Replay(made, policy, len(records), differ, _mean(recorded, prompts), _mean(replayed, prompts))


def _chance_of_other(decision: Decision, own: Considered) -> float:
    """How likely the decision is another one than `own`, between which and its equals there is no difference."""
    if decision.policy is Policy.RANDOM:
        able = sum(each.verdict in CONSIDERED for each in decision.considered)
        return (able - 1) / able
    return float(own.verdict not in ("chosen", "tied"))


def work_of(record: fleet_pb2.RouteRecord) -> Work:
    """The job that was placed."""
    choices = max(record.choices, 1)
    answer, others = round(record.answer_tokens / choices), record.mean_answer_tokens
    return Work(record.prompt_tokens, answer, others, choices, record.repeats_per_s)


def candidate_of(each: fleet_pb2.Candidate) -> Candidate:
    """A worker as the decision saw it. Its rates were put on a level with others' when it was recorded: here each
    worker is a kind of its own, so that they stay."""
    return Candidate(
        worker=each.worker,
        incarnation=each.incarnation,
        state=READY,
        fingerprint=each.incarnation,
        load=Load(each.jobs, each.tokens, each.prefill_tokens, each.sequences),
        rates=Rates(
            prefill_tok_s=each.prefill_tokens_per_s,
            step_s=each.step_ms / 1000,
            sequence_s=each.sequence_ms / 1000,
            fetch_tok_s=each.fetch_tokens_per_s,
        ),
        held=each.held_tokens,
        stored=each.stored_tokens,
        max_running=each.max_running,
        kv_tokens=each.kv_tokens,
        used=each.used_tokens,
    )


def replay_figures(found: Iterable[Replay]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(each) for each in found]


def replay_cells(each: Replay) -> tuple[str, ...]:
    """A line of the table."""
    before, after = each.recorded, each.replayed
    return (
        each.recorded_policy,
        each.policy,
        str(each.decisions),
        f"{each.differ / each.decisions:.1%}",
        *(f"{choices.cost_s:.3f} s" for choices in (before, after)),
        *(f"{choices.first_token_s:.3f} s" for choices in (before, after)),
        *(f"{choices.cached:.1%}" for choices in (before, after)),
    )


def _mean(choices: Sequence[tuple[Cost, int]], prompt_tokens: int) -> Choices:
    count = len(choices)
    return Choices(
        cost_s=math.fsum(each.total_s for each, _ in choices) / count,
        first_token_s=math.fsum(each.wait_s + each.prefill_s + each.fetch_s for each, _ in choices) / count,
        cached=sum(tokens for _, tokens in choices) / prompt_tokens if prompt_tokens else 0.0,
    )
