"""What policies make of a fleet, in simulated time: four workers with small pools, and loads that try each weakness.

The bounds are some way from what comes out, so that a change of a constant does not break them, and a policy that has
lost its sense does.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import pytest

from gateway.cost import Rates
from gateway.router import Policy
from tests.unit.gateway.simulation import BLOCK, Outcome, SimJob, SimWorker, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

POOL = 8192
"""Tokens of a worker's pool."""
CPU = Rates(prefill_tok_s=1000.0, step_s=0.012, sequence_s=0.002)


class Load(NamedTuple):
    """Jobs that arrive by themselves, so many a second. `groups` of prompts share their first `shared` tokens each; a
    prompt has `own` tokens beside these, an answer `answer` give or take half."""

    rate: float
    groups: int = 16
    shared: int = 1024
    own: int = 64
    answer: int = 48
    jobs: int = 300


def arrivals(load: Load) -> list[SimJob]:
    rng, now, jobs = random.Random(7), 0.0, []
    for index in range(load.jobs):
        now += rng.expovariate(load.rate)
        group = rng.randrange(load.groups)
        own = rng.randrange(load.own // 2, 3 * load.own // 2)
        blocks = [f"g{group}.{at}".encode() for at in range(load.shared // BLOCK)]
        blocks += [f"j{index}.{at}".encode() for at in range((load.shared + own) // BLOCK - len(blocks))]
        answer = max(2, rng.randrange(load.answer // 2, 3 * load.answer // 2))
        jobs.append(SimJob(now, load.shared + own, answer, tuple(blocks)))  # type: ignore[arg-type]
    return jobs


@cache
def outcome(
    load: Load, policy: Policy, told: tuple[float, ...] = (1, 1, 1, 1), max_running: int = 32, pool: int = POOL
) -> Outcome:
    """`told`: by what factor each worker misjudges its own speed."""
    workers = [
        SimWorker(f"w{index}", pool // BLOCK, CPU, told=error, max_running=max_running)
        for index, error in enumerate(told)
    ]
    return simulate(workers, arrivals(load), policy)


def assert_no_worse(load: Load, **settings: int) -> None:
    """Than by load alone: by 5 % at most, or a step of a few tokens."""
    ours, theirs = outcome(load, Policy.PREFIX, **settings), outcome(load, Policy.LEAST_LOADED, **settings)
    assert ours.ttft_p90 <= 1.05 * theirs.ttft_p90 + 0.02
    assert ours.ttft_p50 <= 1.05 * theirs.ttft_p50 + 0.02
    assert ours.throughput >= 0.97 * theirs.throughput


TWICE = 16
"""Groups whose prefixes take twice a pool: 16 of 1024 tokens."""


@pytest.mark.parametrize("rate", [1.5, 6, 16], ids=["low", "medium", "saturating"])
def test_where_prefixes_take_twice_a_pool_caches_are_used(rate: float) -> None:
    load = Load(rate, TWICE)
    ours, others = outcome(load, Policy.PREFIX), [outcome(load, each) for each in Policy if each is not Policy.PREFIX]
    for theirs in others:
        assert ours.ttft_p90 < theirs.ttft_p90 / 3
        assert ours.hit_rate > 1.7 * theirs.hit_rate
    assert ours.hit_rate > 0.8
    assert ours.equal > 0.99


def test_a_fleet_that_is_asked_for_too_much_does_more() -> None:
    load = Load(16, TWICE)
    assert outcome(load, Policy.PREFIX).throughput > 2 * outcome(load, Policy.LEAST_LOADED).throughput


@pytest.mark.parametrize("groups", [4, 32, 64])
def test_whatever_the_working_set_it_is_never_worse(groups: int) -> None:
    """Half a pool, all pools together, twice that."""
    for rate in (2, 6):
        load = Load(rate, groups)
        ours, theirs = outcome(load, Policy.PREFIX), outcome(load, Policy.LEAST_LOADED)
        assert_no_worse(load)
        assert ours.hit_rate > theirs.hit_rate


@pytest.mark.parametrize("max_running", [4, 32])
@pytest.mark.parametrize("rate", [1, 3, 4, 6])
def test_where_nothing_can_be_cached_it_is_as_good_as_by_load(rate: float, max_running: int) -> None:
    assert_no_worse(Load(rate, groups=1, shared=0, own=900, answer=80, jobs=300), max_running=max_running)


@pytest.mark.parametrize("rate", [4, 10, 20])
def test_short_prompts_with_long_answers_are_spread_as_by_load(rate: float) -> None:
    assert_no_worse(Load(rate, groups=1, shared=0, own=60, answer=200, jobs=300))


@pytest.mark.parametrize(("rate", "shared"), [(2, 1024), (8, 1024), (20, 1024), (26, 1024), (2, 4096), (8, 4096)])
def test_a_single_hot_prefix_does_not_melt_its_holder(rate: float, shared: int) -> None:
    assert_no_worse(Load(rate, groups=1, shared=shared))


@pytest.mark.parametrize("rate", [2, 5])
def test_small_pools_are_not_flooded(rate: float) -> None:
    """Each has room for three prompts: what does not fit waits, on whichever worker, however many slots there are."""
    for load in (Load(rate, groups=4), Load(rate, groups=1), Load(rate, groups=1, shared=0, own=900)):
        assert_no_worse(load, pool=4096)


def used(load: Load, **settings: int) -> Sequence[int]:
    """How many jobs each worker got."""
    return sorted(outcome(load, Policy.PREFIX, **settings).by_worker.values())


def test_a_hot_prefix_stays_where_it_is_while_that_is_idle_and_spreads_when_it_is_not() -> None:
    """In two, if a second job comes while the first one's prompt is computed."""
    assert used(Load(0.2, groups=1, jobs=50))[:2] == [0, 0]
    assert min(used(Load(20, groups=1, shared=2048))) > 300 // 8


def test_workers_that_misjudge_their_speed_are_not_flooded() -> None:
    """All are equally fast; one says a third more, one a quarter less. The first would get whatever nobody knows, and
    lose what it has."""
    for load in (Load(1.5, TWICE), Load(16, TWICE), Load(4, groups=1, shared=0, own=900, answer=80, jobs=300)):
        fooled = outcome(load, Policy.PREFIX, (1.33, 1, 1, 0.75))
        assert fooled.hit_rate >= outcome(load, Policy.PREFIX).hit_rate - 0.02
        assert fooled.throughput >= 0.98 * outcome(load, Policy.PREFIX).throughput
    counts = outcome(Load(1.5, TWICE), Policy.PREFIX, (1.33, 1, 1, 0.75)).by_worker
    assert min(counts.values()) > 40


SEEMING = (0.64, 0.75, 0.85, 0.95, 1.0, 1.1, 1.3, 1.6)
"""By what factors workers that are equal seem to differ, on a machine that does much else."""


def hot_prefix(policy: Policy, workers: int, *, burst: int, jobs: int, told: tuple[float, ...] = (1.0,)) -> Outcome:
    """Slow workers with steps of 0.1 s, of which five in six have a job at any time, all with one prefix. `burst` jobs
    come at once, the others when all those have ended; only they count, as they are three quarters of all."""
    assert jobs == 3 * burst
    load = Load(rate=0.85 * workers, groups=1, answer=8, jobs=jobs)
    later = [replace(job, arrival_s=60 + job.arrival_s) for job in arrivals(load)]
    first = [replace(job, arrival_s=0.0) for job in later[:burst]]
    slow = Rates(prefill_tok_s=400.0, step_s=0.1, sequence_s=0.0001)
    fleet = [SimWorker(f"w{at}", POOL // BLOCK, slow, told=told[at % len(told)]) for at in range(workers)]
    return simulate(fleet, first + later, policy)


def test_a_hot_prefix_that_all_hold_goes_by_load_where_workers_misjudge_their_speed() -> None:
    """The one that seems fast must not get jobs while others are idle."""
    ours, theirs = (
        hot_prefix(policy, 16, burst=160, jobs=480, told=SEEMING) for policy in (Policy.PREFIX, Policy.LEAST_LOADED)
    )
    assert ours.ttft_p90 <= 1.05 * theirs.ttft_p90
    assert ours.ttft_p50 <= 1.05 * theirs.ttft_p50


def test_a_hot_prefix_gets_into_as_many_places_as_its_load_needs() -> None:
    """After a crowd that filled half the fleet with it, those that hold it are never idle, and the others always."""
    ours, theirs = (hot_prefix(policy, 32, burst=64, jobs=192) for policy in (Policy.PREFIX, Policy.LEAST_LOADED))
    assert sum(count > 0 for count in ours.by_worker.values()) > 28
    assert ours.ttft_p50 <= 1.05 * theirs.ttft_p50
    assert ours.ttft_p90 <= 1.05 * theirs.ttft_p90 + 0.02


def test_a_worker_that_is_slower_gets_less() -> None:
    workers = [SimWorker(f"w{index}", POOL // BLOCK, CPU, speed=speed) for index, speed in enumerate((1, 1, 1, 0.4))]
    load = Load(3, groups=1, shared=0, own=900, answer=80, jobs=300)
    ours = simulate(workers, arrivals(load), Policy.PREFIX)
    assert ours.by_worker["w3"] < 0.6 * min(ours.by_worker[f"w{index}"] for index in range(3))
