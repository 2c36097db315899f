"""Nothing is found in good runs, and in a run with a lie in it exactly the invariant that the lie breaks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.chaos.checker import check, figures
from bench.chaos.evidence import Rules, Run
from bench.chaos.findings import INVARIANTS
from bench.chaos.history import BAD, LOAD, PROBE
from bench.chaos.mutations import MUTATIONS, Mutation, Proof, good_part, prove, table
from tests.support.made_up_runs import STORIES, decode, made_up

RULES = Rules(decode=decode)
SEEDS = st.integers(0, 2**32)


@settings(max_examples=40, derandomize=True)
@given(SEEDS)
def test_nothing_is_found_in_a_good_run(seed: int) -> None:
    run = made_up(seed)
    assert check(run, RULES) == []
    assert check(run, Rules(lossless=False)) == []
    counted = figures(run, [])
    assert (counted.lost, counted.repeated, counted.differing) == (0, 0, 0)
    assert counted.requests == sum(each.invoked.role != BAD for each in run.requests.values())
    assert counted.accepted + counted.refused == counted.requests


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
@settings(max_examples=8, derandomize=True)
@given(seed=SEEDS)
def test_each_lie_is_caught_by_its_invariant(mutation: Mutation, seed: int) -> None:
    run = made_up(seed)
    changed = mutation.apply(run, random.Random(seed))
    assert changed is not None, "a made-up run has a place for every lie"
    found = check(changed, RULES)
    assert {each.invariant for each in found} == {mutation.invariant}, found
    assert check(run, RULES) == [], "the run itself was changed"


def test_every_invariant_has_a_lie() -> None:
    assert {mutation.invariant for mutation in MUTATIONS} == set(INVARIANTS)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_a_run_is_the_same_for_the_same_seed_and_has_every_story() -> None:
    one, other = made_up(7), made_up(7)
    assert one == other
    assert one != made_up(8)
    roles = [request.invoked.role for request in one.requests.values()]
    assert len(roles) == 16 >= len(STORIES)
    assert BAD in roles
    assert PROBE in roles
    assert any(len(request.streams) > 2 for request in made_up(3).requests.values())


def test_a_proof_counts_what_was_tried_and_caught() -> None:
    proofs = prove(made_up(1), RULES, seed=1, times=2)
    assert [(proof.mutation, proof.tried, proof.caught) for proof in proofs] == [
        (mutation.name, 2, 2) for mutation in MUTATIONS
    ]
    assert all(proof.holds for proof in proofs)


def test_a_checker_that_looks_away_does_not_pass() -> None:
    empty = Run(requests={}, oracle={})
    assert {proof.mutation for proof in prove(empty, RULES, seed=0) if proof.tried} == {"charge never refunded"}
    blind = Proof("changed text", "I2", 3, 1, ("0/changed text/0: nothing", "0/changed text/1: I1 I2"))
    assert not blind.holds
    assert table([blind]).splitlines() == [
        "mutation      breaks  tried  caught",
        "changed text  I2          3       1",
        "    MISSED 0/changed text/0: nothing",
        "    MISSED 0/changed text/1: I1 I2",
    ]


def test_what_a_run_breaks_itself_is_not_counted_for_a_lie() -> None:
    lie = next(mutation for mutation in MUTATIONS if mutation.name == "hanging call")
    run = lie.apply(made_up(5), random.Random(0))
    assert run is not None
    (finding,) = check(run, RULES)
    assert (finding.invariant, finding.name) == ("I1", "hang")
    rest = good_part(run, RULES, seed=0)
    assert set(run.requests) - set(rest.requests) == {finding.where.split(" ")[0]}
    assert set(rest.broker.jobs) == set(rest.broker.logs) == set(run.broker.jobs) & set(rest.requests)
    gone = set(run.broker.keys) - set(rest.broker.keys)
    assert {name.partition(":")[0] for name in gone} <= {"job", "log"}
    assert check(rest, RULES) == []
    assert all(proof.holds for proof in prove(run, RULES, seed=2, times=1))


def test_of_a_long_run_a_part_is_taken_that_has_all_roles() -> None:
    run = made_up(6, requests=120)
    part = good_part(run, RULES, seed=1, most=30)
    assert len(part.requests) == 30
    assert part == good_part(run, RULES, seed=1, most=30)
    assert part != good_part(run, RULES, seed=2, most=30)
    assert {request.invoked.role for request in part.requests.values()} == {"load", "probe", "bad"}
    assert check(part, RULES) == []


def test_of_a_long_run_those_are_kept_that_the_broker_still_knows_and_another_worker_took_over() -> None:
    run = made_up(3, requests=600)
    resumed = [name for name, log in run.broker.logs.items() if max(entry.attempt for entry in log) > 1][:2]
    once = [name for name, log in run.broker.logs.items() if max(entry.attempt for entry in log) == 1][:10]
    logs = {name: run.broker.logs[name] for name in (*once, *resumed)}
    run = replace(run, broker=replace(run.broker, logs=logs))
    part = good_part(run, RULES, seed=1, most=30)
    assert len(part.requests) == 30
    assert set(resumed) <= set(part.broker.logs)
    assert len(part.broker.logs) >= 10
    assert {each.invoked.role for each in part.requests.values()} == {LOAD, BAD, PROBE}
