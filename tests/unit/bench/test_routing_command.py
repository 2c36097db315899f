"""What the command makes of its options, what it prints and what it writes. No fleet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from bench import routing_command
from bench.routing_command import called, configured
from octavo.v1 import fleet_pb2
from ops.cli import main
from ops.console import INTERRUPTED
from tests.unit.bench.routing_made import FACTS, GIVEN_UP, RUNS, run

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from bench.routing import Results, RoutingConfig
    from ops.config import FleetConfig


def options(*arguments: str) -> tuple[FleetConfig, RoutingConfig]:
    context = routing_command.routing.make_context("routing", [*arguments])
    return configured(context, dict(context.params))


def test_defaults_with_a_real_model() -> None:
    settings, config = options()
    assert (settings.workers, settings.threads, settings.kv_tokens, settings.model) == (4, 1, 4096, "smollm2-135m")
    assert [(each.name, each.groups, each.load) for each in config.scenarios] == [
        ("ratio 2", 16, 0.4),
        ("ratio 2", 16, 1.0),
        ("ratio 2", 16, 3.0),
    ]
    assert config.most_s < 17 * 60


def test_defaults_with_simulated_workers() -> None:
    settings, config = options("--simulated")
    assert (settings.workers, settings.model) == (32, "simulated:400,100")
    assert [each.name for each in config.scenarios] == [
        *(f"ratio {ratio}" for ratio in ("0.5", "1", "2", "4", "8")),
        *("hot prefix", "hit-free"),
    ]
    # A minute is left for 32 workers to start, and for the plot.
    assert config.most_s < 26 * 60


def test_parts_of_a_sweep() -> None:
    settings, config = options(
        *("--simulated", "--workers", "3", "--kv-tokens", "2048", "--ratios", "0.5,3", "--loads", "1,2"),
        *("--no-hot", "--hit-free", "--policies", "prefix,random,prefix", "--seconds", "4", "--capacity", "2.5"),
    )
    assert (settings.workers, settings.kv_tokens, settings.model) == (3, 2048, "simulated:400,100")
    assert [(each.name, each.load) for each in config.scenarios] == [
        *(("ratio 0.5", 1.0), ("ratio 0.5", 2.0), ("ratio 3", 1.0), ("ratio 3", 2.0)),
        ("hit-free", 0.8),
    ]
    assert (config.policies, config.seconds, config.capacity) == (("prefix", "random"), 4.0, 2.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ratios", "0"), "'0' is no list of positive numbers"),
        (("--loads", "1,x"), "'1,x' is no list of positive numbers"),
        (("--loads", "inf"), "'inf' is no list of positive numbers"),
        (("--policies", "best"), "'best' is none of prefix, least-loaded, round-robin, random"),
        (("--kv-tokens", "512"), "a pool of 512 tokens has no room for 616"),
    ],
)
def test_what_can_not_be(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        options(*arguments)


def test_the_page_says_what_was_called() -> None:
    arguments = ["--simulated", "--no-hot", "--ratios", "0.5,2", "--tail-tokens", "3:9", "--out", "x", "--json"]
    arguments += ["--redis", "redis://:secret@there"]
    context = routing_command.routing.make_context("routing", arguments)
    assert called(context) == "octavo bench routing --simulated --ratios 0.5,2 --no-hot --tail-tokens 3:9"


@pytest.mark.parametrize(("interrupted", "plot"), [(False, "none"), (True, "svg")])
def test_the_figures_so_far_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, interrupted: bool, plot: str
) -> None:
    async def some(_config: object, _settings: object, results: Results, _note: object) -> None:
        results.facts = {**FACTS, **results.facts}
        results.runs += RUNS
        results.routes = [fleet_pb2.RouteRecord(policy="prefix")]
        results.complete = not interrupted

    async def ended(work: Coroutine[Any, Any, None]) -> None:
        await work
        if interrupted:
            raise SystemExit(INTERRUPTED)

    monkeypatch.setattr(routing_command, "run_routing", some)
    monkeypatch.setattr(routing_command, "unless_interrupted", ended)
    ran = CliRunner().invoke(
        main, ["bench", "routing", "--out", str(tmp_path), "--json", "--seconds", "2", "--plot", plot]
    )
    assert ran.exit_code == (INTERRUPTED if interrupted else 0)
    written = json.loads((tmp_path / "routing.json").read_text())
    assert json.loads(ran.stdout) == written
    assert (written["complete"], len(written["runs"])) == (not interrupted, len(RUNS))
    assert written["command"] == "octavo bench routing --seconds 2"
    assert ("Interrupted" in (tmp_path / "routing.md").read_text()) is interrupted
    drawn = tmp_path / "routing.svg"
    assert drawn.exists() is (plot == "svg")
    assert plot == "none" or drawn.read_text().startswith("<?xml")
    assert (tmp_path / "routes.jsonl").read_text() == '{"policy": "prefix"}\n'


def test_a_sweep_without_an_answer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are kept all the same."""

    async def some(_config: object, _settings: object, results: Results, _note: object) -> None:
        results.facts = {**FACTS, **results.facts}
        results.runs += [run(policy, 2.0, 3.0, GIVEN_UP) for policy in ("prefix", "least-loaded")]
        results.complete = True

    monkeypatch.setattr(routing_command, "run_routing", some)
    ran = CliRunner().invoke(main, ["bench", "routing", "--out", str(tmp_path), "--plot", "none"])
    assert ran.exit_code == 1
    assert ran.stderr.splitlines()[-1] == "Error: nothing was answered: raise --drain or --seconds"
    assert "Nothing was answered: raise --drain or --seconds." in ran.stdout
    assert "aim" not in ran.stdout
    page = (tmp_path / "routing.md").read_text()
    assert "- Nothing was answered: raise --drain or --seconds.\n" in page
    assert "aim" not in page
    assert json.loads((tmp_path / "routing.json").read_text())["versus_least_loaded"] == []


def test_help_tells_the_defaults_of_either_kind() -> None:
    told = " ".join(CliRunner().invoke(main, ["bench", "routing", "--help"]).output.split())
    assert "Workers to start. Default: 4; simulated 32." in told
    assert "Size of a worker's pool. Default: 4096; simulated 8192." in told
    assert "Default: smollm2-135m; with --simulated simulated:400,100." in told
    assert "default: 32768" not in told
    for option in ("--gateways=2", "--policy=prefix"):
        refused = CliRunner().invoke(main, ["bench", "routing", option])
        assert refused.exit_code == 2
        assert "No such option" in refused.output


def test_what_can_not_be_kept_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = CliRunner().invoke(main, ["bench", "routing", "--out", str(tmp_path / "file" / "folder")])
    assert ran.exit_code == 2
    assert "results can't be written to" in ran.output
