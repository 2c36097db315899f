"""Schedules keep their rules, whatever the seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.chaos.command import GRACE_S, STARTS_S
from bench.chaos.run import IDLE_S
from bench.chaos.schedule import (
    BROKER,
    GATEWAY,
    LOSING,
    NATURES,
    WORKER,
    WORKERS,
    Fault,
    Kind,
    Plan,
    Schedule,
    draw,
    recovery_s,
)
from gateway.client import OPTIONS
from kvstore.client import BrokerConfig
from worker.config import WorkerConfig

PLAN = Plan(60.0, ("w0", "w1", "w2"), ("g0", "g1"))
PLANS = st.builds(
    Plan,
    seconds=st.floats(20, 400),
    workers=st.integers(1, 4).map(lambda count: tuple(f"w{index}" for index in range(count))),
    gateways=st.integers(1, 3).map(lambda count: tuple(f"g{index}" for index in range(count))),
    kinds=st.sets(st.sampled_from(Kind), min_size=1).map(lambda kinds: tuple(sorted(kinds))),
    every_s=st.floats(0.5, 20),
    pairs=st.floats(0, 1),
    drain_s=st.floats(0, 10),
    all_at_once=st.booleans(),
    last_kill=st.booleans(),
)


def over(plan: Plan, fault: Fault) -> float:
    """When the target has recovered."""
    return fault.at_s + fault.duration_s + recovery_s(NATURES[fault.kind], plan)


def lasting(schedule: Schedule) -> list[Fault]:
    return [fault for fault in schedule.faults if not NATURES[fault.kind].instant]


@settings(max_examples=50, derandomize=True)
@given(st.integers(0, 2**32), PLANS)
def test_rules(seed: int, plan: Plan) -> None:
    schedule = draw(seed, plan)
    names = {WORKER: plan.workers, GATEWAY: plan.gateways, BROKER: (BROKER,), WORKERS: (WORKERS,)}
    for fault in schedule.faults:
        nature = NATURES[fault.kind]
        assert fault.kind in plan.kinds
        assert fault.target in names[nature.scope]
        assert plan.warm_s <= fault.at_s
        assert over(plan, fault) <= plan.seconds - plan.calm_s + 0.01, "healed before the quiet end"
        assert nature.shortest_s - 0.01 <= fault.duration_s <= nature.longest_s + 0.01
    assert [fault.at_s for fault in schedule.faults] == sorted(fault.at_s for fault in schedule.faults)


@settings(max_examples=50, derandomize=True)
@given(st.integers(0, 2**32), PLANS)
def test_nobody_has_two_faults_at_once_and_one_of_each_is_left_alone(seed: int, plan: Plan) -> None:
    faults = lasting(draw(seed, plan))
    for fault in faults:
        active = {other.target for other in faults if other.at_s <= fault.at_s < over(plan, other) - 0.01}
        same = [other for other in faults if other.target == fault.target and other is not fault]
        assert not any(other.at_s <= fault.at_s < over(plan, other) - 0.01 for other in same)
        if not plan.all_at_once:
            assert not set(plan.workers) <= active
            assert not set(plan.gateways) <= active


@settings(max_examples=50, derandomize=True)
@given(st.integers(0, 2**32), PLANS)
def test_while_workers_are_restarted_in_turn_nothing_else_strikes_one(seed: int, plan: Plan) -> None:
    plan = replace(plan, kinds=(*plan.kinds, Kind.WORKERS_ROLL))
    faults = lasting(draw(seed, plan))
    of_workers = [fault for fault in faults if fault.target in (*plan.workers, WORKERS)]
    for roll in (fault for fault in of_workers if fault.kind is Kind.WORKERS_ROLL):
        for other in of_workers:
            assert other is roll or other.at_s >= over(plan, roll) - 0.01 or over(plan, other) <= roll.at_s + 0.01
        assert over(plan, roll) == roll.at_s + (plan.drain_s + plan.start_s) * len(plan.workers)


@settings(max_examples=50, derandomize=True)
@given(st.integers(0, 2**32), PLANS)
def test_a_last_kill_is_behind_all_that_strikes_workers_or_loses_something(seed: int, plan: Plan) -> None:
    """So it leaves jobs that another worker went on with, and the broker has their logs."""
    plan = replace(plan, seconds=plan.seconds + 30, kinds=tuple({*plan.kinds, Kind.WORKER_KILL}), last_kill=True)
    faults = draw(seed, plan).faults
    if len(plan.workers) == 1 and not plan.all_at_once:
        assert Kind.WORKER_KILL not in {fault.kind for fault in faults}
        return
    before = [fault for fault in faults if NATURES[fault.kind].scope in (WORKER, WORKERS) or fault.kind in LOSING]
    *others, last = before
    assert (last.kind, last.at_s) == (
        Kind.WORKER_KILL,
        pytest.approx(plan.seconds - plan.calm_s - plan.start_s, abs=0.01),
    )
    assert all(over(plan, fault) <= last.at_s + 0.01 for fault in others)


def test_a_rolling_restart_has_time_for_streams_to_end() -> None:
    """Three workers took 67 to 70 s on two cores."""
    plan = Plan(600.0, ("w0", "w1", "w2"), ("g0",), start_s=STARTS_S, drain_s=GRACE_S)
    assert recovery_s(NATURES[Kind.WORKERS_ROLL], plan) > 70
    assert recovery_s(NATURES[Kind.WORKER_KILL], plan) == STARTS_S


def test_the_same_for_the_same_seed() -> None:
    assert draw(3, PLAN) == draw(3, PLAN)
    assert draw(3, PLAN).faults != draw(4, PLAN).faults


def test_a_schedule_is_what_it_was() -> None:
    """A seed in a report of long ago still names the same run."""
    plan = replace(PLAN, seconds=40.0, kinds=(Kind.WORKER_KILL, Kind.BROKER_PAUSE, Kind.GATEWAY_TERM))
    assert str(draw(11, plan)).splitlines() == PINNED


PINNED = [
    "seed 11: 8 faults in 40 s",
    "    3.0 s  broker-pause    broker    for 3.6 s",
    "    3.8 s  gateway-term    g1        at once",
    "    4.4 s  worker-kill     w1        at once",
    "    4.6 s  worker-kill     w0        at once",
    "    9.2 s  broker-pause    broker    for 2.2 s",
    "   12.7 s  gateway-term    g1        at once",
    "   14.5 s  broker-pause    broker    for 2.3 s",
    "   16.0 s  worker-kill     w1        at once",
]


def test_with_one_worker_none_is_struck_unless_asked_for() -> None:
    plan = replace(PLAN, workers=("w0",), kinds=(Kind.WORKER_KILL, Kind.WORKER_FREEZE))
    assert draw(1, plan).faults == ()
    assert {fault.target for fault in draw(1, replace(plan, all_at_once=True)).faults} == {"w0"}


def test_every_kind_strikes_in_a_run_that_is_long_enough() -> None:
    counts = draw(5, replace(PLAN, seconds=1800.0)).counts()
    assert set(counts) == {kind.value for kind in Kind}
    assert max(counts.values()) - min(counts.values()) <= 3


def test_gateways_are_away_for_longer_than_clients_wait_for_them() -> None:
    kinds = (Kind.GATEWAY_FREEZE, Kind.GATEWAY_CUT)
    faults = draw(7, replace(PLAN, seconds=3600.0, kinds=kinds)).faults
    for kind in kinds:
        lasts = [fault.duration_s for fault in faults if fault.kind is kind]
        assert max(lasts) > sum(gone_after_s()) > min(lasts)
        assert max(lasts) <= 22.0


def test_no_gateway_is_away_for_as_long_as_workers_grant_its_jobs() -> None:
    grace = WorkerConfig("w0", BrokerConfig("redis://nowhere"), "simulated").orphan_grace
    for nature in (NATURES[Kind.GATEWAY_FREEZE], NATURES[Kind.GATEWAY_CUT]):
        assert nature.longest_s < grace
    assert grace + 10 < IDLE_S, "its jobs end, and what they held is told with a heartbeat"


def gone_after_s() -> tuple[float, float]:
    """In which time the product's client leaves a gateway that says nothing."""
    told = dict(OPTIONS)
    return told["grpc.keepalive_time_ms"] / 1000, told["grpc.keepalive_timeout_ms"] / 1000


def test_faults_may_come_in_pairs() -> None:
    plan = replace(PLAN, seconds=600.0)
    faults = draw(2, plan).faults
    assert any(after.at_s - before.at_s < 1.0 for before, after in pairwise(faults))
    overlapping = [
        (one, other)
        for one in lasting(draw(2, plan))
        for other in lasting(draw(2, plan))
        if one.at_s < other.at_s < over(plan, one) and BROKER in (one.target, other.target)
    ]
    assert overlapping, "a process and the broker at the same time"


def test_plans_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="leave no time"):
        draw(1, replace(PLAN, seconds=13.0))
    with pytest.raises(ValueError, match="no kind of fault"):
        draw(1, replace(PLAN, kinds=()))
