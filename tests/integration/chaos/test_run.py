"""A whole run on a real fleet, with a model that has no weights."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench.chaos.driver import Habits
from bench.chaos.evidence import Rules, Scrape
from bench.chaos.history import gather, read
from bench.chaos.run import ChaosConfig, Watch, run_chaos
from bench.chaos.schedule import Kind
from kvstore.embedded import find_server
from ops.config import FleetConfig

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = FleetConfig(
    workers=2, gateways=2, model="simulated:2000,10", threads=1, kv_tokens=8192, grace=5.0, namespace="chaos"
)
CONFIG = ChaosConfig(
    seed=3,
    seconds=14.0,
    payloads=12,
    tokens=(8, 48),
    kinds=(Kind.LOST_REPLY, Kind.RESET, Kind.BROKER_SLOW, Kind.GATEWAY_KILL),
    every_s=2.0,
    start_s=2.0,
    calm_s=5.0,
    habits=Habits(rate=4.0, deadline_s=40.0, cancels=0.1, bad=0.1),
    rules=Rules(ample_s=40.0),
)


@pytest.mark.timeout(240)
async def test_a_run_with_faults_that_nothing_is_lost_by(tmp_path: Path) -> None:
    notes: list[str] = []
    report = await run_chaos(CONFIG, SETTINGS, tmp_path, notes.append, print)
    assert report.findings == [], str(report)
    assert report.passed, str(report)
    assert {each.fault.kind for each in report.struck if each.done} >= {Kind.LOST_REPLY, Kind.RESET, Kind.GATEWAY_KILL}
    assert report.figures.accepted == report.figures.finished + report.figures.cancelled > 20
    tried = {proof.mutation for proof in report.proofs if proof.tried}
    assert tried >= {"dropped tokens", "repeated tokens", "double finish", "missing finish", "changed token"}
    assert tried >= {"leaked block", "job left in a stream", "unfenced write", "error of the wrong class"}

    told = json.loads(json.dumps(report.as_dict()))
    assert (told["seed"], told["passed"], told["findings"]) == (3, True, [])
    assert told["figures"]["accepted"] == report.figures.accepted
    assert report.figures.merged > 5
    assert "no violation" in str(report)
    with (tmp_path / "history.jsonl").open() as lines:
        recorded = gather(read(lines))
    assert len([one for one in recorded.values() if one.invoked.role != "bad"]) == report.figures.requests
    assert notes[0].startswith("seed 3: ")


@pytest.mark.timeout(240)
async def test_workers_that_die_freeze_and_leave_lose_nothing(tmp_path: Path) -> None:
    kinds = (Kind.WORKER_KILL, Kind.WORKER_FREEZE, Kind.WORKER_TERM, Kind.WORKERS_ROLL)
    # Answers of seconds, and a grace of less: so some are in the middle whenever a worker goes.
    slow = replace(SETTINGS, model="simulated:2000,40", grace=0.5)
    habits = replace(CONFIG.habits, rate=6.0)
    config = replace(CONFIG, seed=5, seconds=40.0, tokens=(24, 96), kinds=kinds, every_s=3.0, habits=habits)
    report = await run_chaos(config, slow, tmp_path, lambda _: None, print)
    assert report.passed, str(report)
    assert {each.fault.kind for each in report.struck if each.done} == set(kinds)
    assert report.figures.resumed > 5
    assert report.figures.accepted == report.figures.finished + report.figures.cancelled > 100


@pytest.mark.timeout(240)
async def test_what_the_broker_loses_is_made_up_for(tmp_path: Path) -> None:
    kinds = (Kind.BROKER_TORN, Kind.BROKER_LOSS, Kind.BROKER_FLUSH, Kind.BROKER_KILL)
    config = replace(CONFIG, seed=6, seconds=40.0, kinds=kinds, every_s=4.0)
    report = await run_chaos(config, SETTINGS, tmp_path, lambda _: None, print)
    assert report.passed, str(report)
    assert {each.fault.kind for each in report.struck if each.done} == set(kinds)
    assert report.figures.lost == report.figures.repeated == report.figures.differing == 0


async def test_gauges_of_lives_that_are_over_say_nothing() -> None:
    watch = Watch(lambda: {"w0/2": "127.0.0.1:1"})
    watch._pages = {"w0/1": [Scrape({"g": 5.0}, {"c": 1.0})], "w0/2": [Scrape({"g": 0.0}, {"c": 2.0})]}
    assert await watch.sees_idle()  # nobody answers there
    assert watch.pages() == {
        "w0/1": (Scrape({}, {"c": 1.0}),),
        "w0/2": (Scrape({"g": 0.0}, {"c": 2.0}),),
    }


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here."""
    return find_server()
