"""Routing decisions, by every policy."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.cost import Candidate, Rates, Work
from gateway.router import Decision, Policy, route
from kvstore.registry import Load

WORK = Work(prompt=1000, answer=10, others=10)
RATES = Rates(prefill_tok_s=1000.0, step_s=0.01, sequence_s=0.001)


def candidate(name: str, tokens: int = 0, state: str = "ready", **fields: Any) -> Candidate:
    """`jobs`, of one sequence each, and `prefill` go to its load."""
    jobs = fields.pop("jobs", 0)
    load = Load(jobs, tokens, fields.pop("prefill", 0), jobs)
    return Candidate(name, f"{name}-1", state, load=load, **{"fingerprint": "f", "rates": RATES, **fields})


def decide(
    *candidates: Candidate,
    policy: Policy = Policy.PREFIX,
    refused: dict[str, str] | None = None,
    seed: int = 0,
    last: str = "",
    work: Work = WORK,
) -> Decision:
    return route(candidates, work, policy=policy, refused=refused or {}, rng=random.Random(seed), last=last)


def chosen(*candidates: Candidate, **options: Any) -> str:
    decision = decide(*candidates, **options)
    assert decision.chosen is not None
    return decision.chosen.candidate.worker


def verdicts(decision: Decision) -> dict[str, str]:
    return {each.candidate.worker: each.verdict for each in decision.considered}


@pytest.mark.parametrize("policy", Policy)
def test_only_those_that_take_jobs_are_chosen_and_all_reasons_are_kept(policy: Policy) -> None:
    decision = decide(
        candidate("a", 300, prefill=300),
        candidate("b", state="draining"),
        candidate("c"),
        policy=policy,
        refused={"c-1": "it is gone"},
    )
    assert verdicts(decision) == {"a": "chosen", "b": "is draining", "c": "it is gone"}
    assert decision.chosen is decision.considered[0]
    assert (decision.work, decision.policy) == (WORK, policy)


@pytest.mark.parametrize("policy", Policy)
def test_nobody_takes_jobs(policy: Policy) -> None:
    for candidates in ([], [candidate("a", state="draining")], [candidate("b")]):
        assert decide(*candidates, policy=policy, refused={"b-1": "its queue is full"}).chosen is None


def test_the_holder_of_the_prefix_is_chosen() -> None:
    decision = decide(candidate("a"), candidate("b", held=992), candidate("c", held=496))
    assert verdicts(decision) == {"a": "costlier", "b": "chosen", "c": "costlier"}
    assert [round(each.cost.prefill_s, 3) for each in decision.considered] == [1.0, 0.008, 0.504]


def test_a_holder_whose_queue_costs_more_than_computing_is_left_alone() -> None:
    """A quarter of the work more is borne with: it is not only this job's."""
    assert chosen(candidate("a"), candidate("b", held=992, prefill=1190, jobs=1)) == "b"
    assert chosen(candidate("a"), candidate("b", held=992, prefill=1210, jobs=1)) == "a"


def test_a_faster_worker_wins_though_it_holds_less() -> None:
    fast = Rates(prefill_tok_s=50_000.0, step_s=0.005, sequence_s=0.0001)
    assert chosen(candidate("a", held=496), candidate("g", rates=fast, fingerprint="g")) == "g"


def test_of_many_that_cost_the_same_any_is_chosen_evenly_and_by_the_given_generator() -> None:
    workers = [candidate(name) for name in "abcd"]
    for policy in (Policy.PREFIX, Policy.LEAST_LOADED, Policy.RANDOM):
        picks = [chosen(*workers, seed=seed, policy=policy) for seed in range(400)]
        assert min(picks.count(name) for name in "abcd") > 60
        assert picks == [chosen(*workers, seed=seed, policy=policy) for seed in range(400)]
        others = "not drawn" if policy is Policy.RANDOM else "tied"
        assert [*verdicts(decide(*workers, policy=policy)).values()].count(others) == 3


def test_what_differs_by_less_than_a_thousandth_is_tied() -> None:
    near, far = candidate("b", held=1), candidate("c", held=2)
    assert sorted(verdicts(decide(candidate("a"), near)).values()) == ["chosen", "tied"]
    assert verdicts(decide(candidate("a"), far)) == {"a": "costlier", "c": "chosen"}


def test_by_load_the_fewest_charged_tokens_win_whatever_is_cached() -> None:
    decision = decide(
        candidate("a", 300), candidate("b", 100), candidate("c", 101, held=992), policy=Policy.LEAST_LOADED
    )
    assert verdicts(decision) == {"a": "costlier", "b": "chosen", "c": "costlier"}


def test_in_turn_by_id_and_round_again() -> None:
    workers = [candidate(name) for name in ("w10", "w0", "w2")]
    last, picks = "", []
    for _ in range(4):
        last = chosen(*workers, policy=Policy.ROUND_ROBIN, last=last)
        picks.append(last)
    assert picks == ["w0", "w10", "w2", "w0"]
    assert chosen(*workers, policy=Policy.ROUND_ROBIN, last="w1") == "w10", "one that left loses nobody's turn"
    decision = decide(*workers, policy=Policy.ROUND_ROBIN, last="w0")
    assert verdicts(decision) == {"w10": "chosen", "w0": "not its turn", "w2": "not its turn"}
