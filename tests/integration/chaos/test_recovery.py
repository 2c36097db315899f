"""Acceptance on small fleets without weights: streams go on when their worker goes; what durability costs is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.chaos.durability import MODES, DurabilityConfig, file_bytes, run_durability, write_down
from bench.chaos.recovery import run_recovery
from bench.chaos.scenarios import RecoveryConfig, Scenario
from bench.workload import Lengths, Workload
from kvstore.embedded import find_server
from ops.config import FleetConfig

if TYPE_CHECKING:
    from pathlib import Path

    from bench.chaos.server import Server
    from kvstore.client import Broker

FLEET = FleetConfig(workers=2, gateways=2, grpc_port=0, model="simulated:2000,10", threads=1, kv_tokens=8192, grace=1.0)


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here."""
    return find_server()


@pytest.mark.timeout(240)
async def test_streams_go_on_however_their_worker_goes(tmp_path: Path) -> None:
    config = RecoveryConfig(streams=16, tokens=96, freeze_s=6.0, rate=8.0, deadline_s=60.0)
    results = await run_recovery(config, FLEET, tmp_path, print, lambda *_: None)
    assert results["passed"], results
    rows = {row["scenario"]: row for row in results["scenarios"]}
    assert list(rows) == [scenario.value for scenario in Scenario]
    assert all(row["finished"] == row["streams"] >= 16 for row in rows.values() if row["scenario"] != "roll")
    for name in ("kill", "pair", "freeze", "cut"):
        assert rows[name]["moved"] > 0
        # The lease, and the reaper's round behind it; a crowded machine adds seconds, not minutes.
        assert 0.5 < rows[name]["recovery_s"]["max"] < 20
    assert rows["cut"]["fenced"] > 0
    assert rows["roll"]["errors"] == 0


@pytest.mark.timeout(180)
async def test_durability_is_measured_in_turns(tmp_path: Path) -> None:
    workload = Workload(Lengths(16, 32), Lengths(8, 8), seed=1)
    config = DurabilityConfig(workload, concurrency=4, requests=12, rounds=2)
    results = await run_durability(config, FLEET, tmp_path, print)
    assert [(each["mode"], each["level"]["requests"]) for each in results["rounds"]] == [
        (mode, 12) for mode in MODES * 2
    ]
    none, everysec, always = results["modes"]
    assert not any(row["errors"] for row in results["modes"])
    assert none["of_none"] == 1.0
    assert none["bytes_per_token"] == 0
    # Each token is a delivery in a log, with its index and text.
    assert everysec["bytes_per_token"] > 50
    assert always["bytes_per_token"] > 50


async def test_a_server_is_told_how_to_write(server: Server, direct: Broker) -> None:
    for mode in ("always", "no", "everysec", "no"):
        await write_down(direct, mode)
        before = await file_bytes(direct)
        await direct.call("SET", "value", "x" * 1000)
        grown = await file_bytes(direct) - before
        assert grown == 0 if mode == "no" else grown > 1000
        told = await direct.call("INFO", "persistence")
        assert bool(int(told["aof_enabled"])) is (mode != "no")
    assert server.running
