"""`octavo bench chaos`, without a fleet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from bench.chaos.checker import Figures
from bench.chaos.command import chaos
from bench.chaos.driver import Habits
from bench.chaos.evidence import Rules
from bench.chaos.findings import INVARIANTS, Finding
from bench.chaos.mutations import Proof
from bench.chaos.run import ChaosConfig, Report, bearable
from bench.chaos.schedule import Fault, Kind, Plan, draw

if TYPE_CHECKING:
    from pathlib import Path

PROOFS = [Proof(f"lie {name}", name, 2, 2) for name in INVARIANTS]


def report(findings: list[Finding], proofs: list[Proof]) -> Report:
    from bench.chaos.nemesis import Struck

    schedule = draw(4, Plan(60.0, ("w0", "w1"), ("g0", "g1")))
    struck = [
        Struck(Fault(1.0, Kind.WORKER_KILL, "w0"), 1.0, 1.0, "done: pid 7"),
        Struck(Fault(2.0, Kind.DUPLICATE, "broker"), 2.0, 2.0, "skipped: nobody runs a job"),
    ]
    return Report(schedule, struck, 1.5, Figures(requests=3, accepted=2), {"p50": 0.5, "max": 2.0}, findings, proofs)


def ran(monkeypatch: pytest.MonkeyPatch, out: Path, told: Report, *arguments: str) -> tuple[int, str, list[Any]]:
    """Exit status, output, and what the run was asked for."""
    asked: list[Any] = []

    async def run_chaos(config: Any, settings: Any, folder: Any, note: Any, sink: Any) -> Report:
        asked.extend([config, settings, folder])
        sink("w0", "a line")
        return told

    monkeypatch.setattr("bench.chaos.run.run_chaos", run_chaos)
    result = CliRunner().invoke(chaos, ["--out", str(out), *arguments])
    return result.exit_code, result.output, asked


def test_a_run_that_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--seed", "4", "--minutes", "2", "--workers", "2", "--kind", "reset", "--kind", "worker-kill")
    status, output, (config, settings, folder) = ran(monkeypatch, tmp_path, report([], PROOFS), *arguments)
    assert status == 0
    assert "seed 4: 1 faults injected, 1.50 requests/s" in output
    assert "longest silence in an answer: p50 0.50 s, max 2.00 s\nno violation" in output
    assert (config.seed, config.seconds, config.kinds) == (4, 120.0, (Kind.RESET, Kind.WORKER_KILL))
    assert config.rules == Rules()
    assert (settings.workers, settings.gateways, settings.namespace, folder) == (2, 2, "chaos", tmp_path)
    assert (tmp_path / "log.txt").read_text() == "w0 a line\n"
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["passed"], written["faults"], written["skipped"]) == (True, {"worker-kill": 1}, 1)
    assert written["rate"] == 1.5
    assert written["longest_silence_s"] == {"p50": 0.5, "max": 2.0}


@pytest.mark.parametrize(("share", "served", "rate"), [(None, 0.5, 2.0), (0.5, 0.5, 0.25), (0.5, 9.0, 2.0)])
def test_a_fleet_is_not_asked_for_more_than_it_can_bear(share: float | None, served: float, rate: float) -> None:
    assert bearable(ChaosConfig(share=share, habits=Habits(rate=2.0)), served) == rate


def test_defaults_strike_with_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, output, (config, settings, _) = ran(monkeypatch, tmp_path, report([], PROOFS), "--json")
    assert json.loads(output) == json.loads((tmp_path / "report.json").read_text())
    assert config.kinds == tuple(Kind)
    assert config.share == 0.5
    assert config.rules == Rules()
    assert (config.seconds, settings.workers, settings.model) == (60.0, 3, "smollm2-135m")


@pytest.mark.parametrize(
    "told",
    [
        report([Finding("I2", "gap", "r1", "says")], PROOFS),
        report([], [Proof("lie", "I1", 2, 1, ("0/lie/0: nothing",)), *PROOFS]),
        report([], PROOFS[1:]),
    ],
    ids=["a violation", "a lie that was missed", "an invariant that no lie was tried for"],
)
def test_a_run_that_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: Report) -> None:
    status, _, _ = ran(monkeypatch, tmp_path, told)
    assert status == 1
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is False
