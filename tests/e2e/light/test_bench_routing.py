"""`octavo bench routing` on small fleets of simulated workers, and `octavo bench replay` of what it kept."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.e2e.harness import OCTAVO, octavo

if TYPE_CHECKING:
    from pathlib import Path

SMALL = (
    *("bench", "routing", "--simulated", "--model", "simulated:20000,5", "--workers", "2", "--kv-tokens", "2048"),
    *("--prefix-tokens", "256", "--tail-tokens", "8:24", "--output-tokens", "4", "--ratios", "1", "--no-hot"),
    *("--no-hit-free", "--loads", "1", "--capacity", "6", "--fill", "1", "--warm", "1", "--drain", "5"),
)


@pytest.mark.timeout(240)
def test_a_sweep_and_its_replay(tmp_path: Path) -> None:
    octavo(*SMALL, "--seconds", "2", "--routes", "1000", "--hit-free", "--out", str(tmp_path), timeout=200)
    told = json.loads((tmp_path / "routing.json").read_text())
    runs: list[dict[str, Any]] = told["runs"]
    assert told["complete"]
    policies = ["prefix", "least-loaded", "round-robin", "random"]
    assert {(run["scenario"], run["policy"]) for run in runs} == {
        (scenario, policy) for scenario in ("ratio 1", "hit-free") for policy in policies
    }
    assert all(run["answered"] == run["requests"] > 5 and not run["errors"] for run in runs)
    assert all(run["workers"] <= 2 and run["lag_s"]["p50"] >= 0 for run in runs)
    hits = {(run["scenario"], run["policy"]): run["hit_rate"] for run in runs}
    assert all(hits["hit-free", policy] == 0 for policy in policies)
    assert hits["ratio 1", "prefix"] > 0.3
    assert (tmp_path / "routing.png").exists()
    assert "| ratio 1 | 1 | prefix |" in (tmp_path / "routing.md").read_text()

    # All policies' gateways wrote down what they decided; each, asked again, decides the same, chance aside.
    again = json.loads(octavo("bench", "replay", str(tmp_path / "routes.jsonl"), "--json").stdout)
    same = {each["policy"]: each["differ"] for each in again if each["policy"] == each["recorded_policy"]}
    assert set(same) == set(policies)
    assert same["prefix"] == same["least-loaded"] == 0
    [drawn] = [each for each in again if each["policy"] == each["recorded_policy"] == "random"]
    assert drawn["differ"] == drawn["decisions"] / 2


@pytest.mark.timeout(240)
def test_an_interrupted_sweep_keeps_its_figures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [OCTAVO, *SMALL, "--seconds", "2", "--ratios", "1,2,3,4,5,6", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "run 2 of 24" in line:
                    break
            fleet = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            process.send_signal(signal.SIGINT)
            said, noted = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 130, noted
    assert "ratio 1" in said
    told = json.loads((tmp_path / "routing.json").read_text())
    assert (told["complete"], len(told["runs"])) == (False, 1)
    assert len(fleet) >= 7
    assert not [pid for pid in fleet if psutil.pid_exists(pid)]
