"""`octavo tune`: its options, what it prints and what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from bench import tune, tune_model
from bench.tune import TuneConfig, run_tune
from bench.tune_command import table
from bench.tune_plot import draw_tune
from ops.cli import main
from ops.console import INTERRUPTED
from tests.unit.bench.tune_made import SMALL, InterruptedSubject, RuledSubject, known_waste
from worker.model.errors import ModelNotFound

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _waste_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "measure_waste", known_waste)


@pytest.fixture
def without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_model, "load", lambda *_, **__: RuledSubject())


FEW = (
    *("--block-sizes", "16,32", "--contexts", "64,320", "--sequences", "1,3"),
    *("--rounds", "1", "--requests", "1", "--most-unused", "0", "--kv-tokens", "2048"),
)


@pytest.mark.usefixtures("without_a_model")
def test_the_command_writes_and_prints(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["tune", *FEW, "--out", str(tmp_path), "--plot", "svg"])
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    assert " ".join(lines[0].split()) == "block run pool neighbours 1 x 64 3 x 64 1 x 320 3 x 320 ratio unused"
    assert lines[1].split()[:3] == ["16", "1", "pieces"]
    assert len(lines) == 1 + 14 + 1
    assert lines[-1].startswith("proposed: --block-size 16 --block-run ")
    assert "octavo: round 1 of 1" in ran.stderr
    results = json.loads((tmp_path / "tune.json").read_text())
    assert len(table(results)[1]) == 14
    assert (tmp_path / "tune.svg").read_bytes().startswith(b"<?xml")
    ran = CliRunner().invoke(main, ["tune", *FEW, "--out", str(tmp_path), "--plot", "none", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["proposal"] == results["proposal"]


def test_a_plot_is_drawn_of_one_size_and_one_step_too(tmp_path: Path) -> None:
    config = replace(SMALL, block_sizes=(16,), contexts=(10,), sequences=(1,))
    results = run_tune(config, RuledSubject(), print)  # type: ignore[arg-type]
    assert {each["neighbours"] for each in results["variants"]} == {None}
    assert table(results)[1][0][3] == "-"
    draw_tune(results, "a title", tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("8,16", "8 is no multiple of 16; the fused decoder needs blocks that are"),
        ("48", "48 is no power of two up to 1024, which a worker needs"),
        ("2048", "2048 is no power of two up to 1024, which a worker needs"),
        ("16,x", "'16,x' is no list of positive numbers"),
    ],
)
def test_sizes_that_nothing_takes_are_refused(sizes: str, message: str) -> None:
    ran = CliRunner().invoke(main, ["tune", "--block-sizes", sizes])
    assert ran.exit_code == 2
    assert message in ran.output


def test_a_model_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def load(model: str, **_: Any) -> Any:
        asked.append(model)
        raise ModelNotFound(f"no model {model}")

    monkeypatch.setattr(tune_model, "load", load)
    ran = CliRunner().invoke(main, ["tune", "--model", "none", "--out", str(tmp_path)])
    assert (ran.exit_code, ran.output, asked) == (1, "Error: no model none\n", ["none"])


def test_the_commands_defaults_are_the_configurations() -> None:
    command = main.get_command(click.Context(main), "tune")
    assert command is not None
    given = command.make_context("tune", []).params
    default = TuneConfig()
    for name in ("block_sizes", "block_runs", "contexts", "sequences", "rounds", "steps", "requests", "most_unused"):
        assert given[name] == getattr(default, name), name
    assert (given["model"], given["kv_tokens"]) == (default.model, default.kv_tokens)


def test_runs_that_no_worker_takes_are_refused() -> None:
    ran = CliRunner().invoke(main, ["tune", "--block-runs", "4096,4097"])
    assert ran.exit_code == 2
    assert "Invalid value for '--block-runs': 4097 is more than 4096" in ran.output


def test_the_command_tells_what_an_interrupted_run_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = [*FEW, "--rounds", "2", "--out", str(tmp_path), "--plot", "none"]
    per_round = 14 * 4 * (2 + 1)
    monkeypatch.setattr(tune_model, "load", lambda *_, **__: InterruptedSubject(per_round + 5))
    ran = CliRunner().invoke(main, ["tune", *few])
    assert ran.exit_code == INTERRUPTED
    assert ran.stdout.splitlines()[-1].startswith("proposed (after 1 of 2 rounds): --block-size ")
    assert "octavo: interrupted; what was measured is kept" in ran.stderr
    assert json.loads((tmp_path / "tune.json").read_text())["rounds"] == 1
    monkeypatch.setattr(tune_model, "load", lambda *_, **__: InterruptedSubject(5))
    ran = CliRunner().invoke(main, ["tune", *few])
    assert (ran.exit_code, ran.stdout) == (INTERRUPTED, "")
    assert ran.stderr.endswith("octavo: interrupted\n")
