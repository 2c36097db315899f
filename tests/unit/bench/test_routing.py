"""The sweep: what is run in which order, what is kept, and what the command makes of its options. No fleet."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import click
import grpc
import grpc.aio
import pytest
from click.testing import CliRunner

from bench import routing, routing_command
from bench.routing import Results, RoutingConfig, Sweep
from bench.routing_client import Sent, send
from bench.routing_command import called, configured
from bench.routing_figures import UNANSWERED, Sample
from bench.routing_load import GroupedLoad, scenarios
from bench.workload import Lengths
from octavo.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from ops.cli import main
from ops.client import Client
from ops.config import FleetConfig
from ops.console import INTERRUPTED
from tests.unit.bench.test_routing_report import FACTS, RUNS
from tests.unit.bench.test_routing_report import run as made_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from pathlib import Path

    from bench.routing_fleet import PolicyFleet

LOAD = GroupedLoad(prefix_tokens=32, tail_tokens=Lengths(4, 4), output_tokens=Lengths(2, 2))
CONFIG = RoutingConfig(
    load=LOAD,
    scenarios=tuple(scenarios((1.0, 2.0), (1.0,), pool_tokens=64, prefix_tokens=32, hot=False, hit_free=True)),
    policies=("prefix", "least-loaded"),
    fill_s=0.0,
    warm_s=0.05,
    seconds=0.2,
    drain_s=5.0,
    capacity=50.0,
)


class Service(inference_pb2_grpc.InferenceServicer, fleet_pb2_grpc.FleetServicer):
    """A gateway that answers at once, and finds half of each prompt in a cache."""

    def __init__(self) -> None:
        self.salts: dict[str, set[tuple[int, ...]]] = {}

    async def Generate(  # noqa: N802 - the service's name
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        prompt = tuple(request.token_ids.ids)
        self.salts.setdefault(request.cache_salt, set()).add(prompt)
        chunk = inference_pb2.Chunk(token_ids=[1, 2], finish=inference_pb2.LENGTH)
        half = len(prompt) // 2
        route = inference_pb2.Route(worker="w0", predicted_cached_tokens=half, cached_tokens=half)
        yield inference_pb2.GenerateResponse(chunks=[chunk], route=route)

    async def GetModel(self, *_: Any) -> inference_pb2.Model:  # noqa: N802
        return inference_pb2.Model(name="m", vocab_size=1000)

    async def ListWorkers(self, *_: Any) -> fleet_pb2.ListWorkersResponse:  # noqa: N802
        worker = fleet_pb2.Worker(id="w0", kv_tokens=64, max_running=8, device="cpu")
        return fleet_pb2.ListWorkersResponse(workers=[worker])


URL = "redis://there"


class Fleet:
    """Stands where a fleet with a gateway for each policy does: one gateway for all."""

    redis = URL

    def __init__(self, client: Client) -> None:
        self.clients = dict.fromkeys(("prefix", "least-loaded"), client)
        self.settled = 0
        self.thefts = iter((3, 5, None, 8))

    async def stolen(self) -> int | None:
        return next(self.thefts)

    async def settle(self) -> None:
        self.settled += 1


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, Fleet]]:
    server, servicer = grpc.aio.server(), Service()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    fleet_pb2_grpc.add_FleetServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        yield servicer, Fleet(client)
    await server.stop(None)


def sweep(config: RoutingConfig, fleet: Fleet) -> tuple[Sweep, Results, list[str]]:
    results, notes = Results({}), list[str]()
    return Sweep(config, cast("PolicyFleet", fleet), results, notes.append), results, notes


async def test_policies_get_the_same_requests_under_salts_of_their_own(service: tuple[Service, Fleet]) -> None:
    servicer, fleet = service
    made, results, notes = sweep(CONFIG, fleet)
    await made.prepare(FleetConfig(workers=1))
    for policy in CONFIG.policies:
        await made.run(CONFIG.scenarios[0], policy)
    first, second = servicer.salts.values()
    assert first == second
    assert len(first) > 2
    assert [run["policy"] for run in results.runs] == ["prefix", "least-loaded"]
    run = results.runs[0]
    assert (run["scenario"], run["groups"], run["requests_per_s"]) == ("ratio 1", 2, 50.0)
    assert (run["hit_rate"], run["predicted_equal"], run["errors"]) == (0.5, 1.0, {})
    assert [each["stolen"] for each in results.runs] == [2, None]
    assert run["sent"] == len(first)
    assert fleet.settled == 2
    assert "run 2 of 6: ratio 1, load 1, least-loaded" in notes[-2]


async def test_caches_are_filled_under_the_salt_of_the_run(service: tuple[Service, Fleet]) -> None:
    servicer, fleet = service
    made, results, _ = sweep(replace(CONFIG, fill_s=1.0), fleet)
    await made.prepare(FleetConfig(workers=1))
    await made.run(CONFIG.scenarios[0], "prefix")
    [prompts] = servicer.salts.values()
    assert len(prompts) > results.runs[0]["requests"]
    assert len({prompt[:32] for prompt in prompts}) == CONFIG.scenarios[0].groups
    assert fleet.settled == 2


async def test_load_is_a_multiple_of_what_the_fleet_answers(
    service: tuple[Service, Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "CALIBRATION_S", 1.0)
    servicer, fleet = service
    made, results, _ = sweep(replace(CONFIG, capacity=None), fleet)
    await made.prepare(FleetConfig(workers=1))
    answered = results.facts["capacity_per_s"]
    assert answered > 0
    assert results.facts["capacity_measured"]
    # Nobody's prompt began like another's.
    prompts = [prompt for asked in servicer.salts.values() for prompt in asked]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)
    few = replace(CONFIG.scenarios[0], load=1e-6)
    await made.run(few, "prefix")
    assert results.runs[0]["requests_per_s"] == pytest.approx(1e-6 * answered)


def test_each_policy_goes_first_in_turn() -> None:
    config = replace(CONFIG, policies=("prefix", "random", "least-loaded"))
    assert [config.order(turn)[0] for turn in range(4)] == ["prefix", "random", "least-loaded", "prefix"]
    assert {frozenset(config.order(turn)) for turn in range(4)} == {frozenset(config.policies)}


def test_a_sweep_tells_how_long_it_takes() -> None:
    assert CONFIG.runs == 6
    assert CONFIG.most_s == pytest.approx(6 * (0.25 + 5.0 + 2 * routing.SETTLE_S + routing.EXTRA_S))
    measured = replace(CONFIG, capacity=None, fill_s=10.0)
    assert measured.most_s == pytest.approx(CONFIG.most_s + 60 + routing.CALIBRATION_S + routing.SETTLE_S)
    assert CONFIG.told() == (
        "6 runs: 0 s to fill caches, 0.05 s to warm up, 0.2 s that count and up to 5 s to drain; at most 3 min once "
        "the fleet has started; Ctrl-C ends it with the figures so far"
    )
    assert measured.told().startswith(
        "20 s to measure what the fleet answers without hits, then 6 runs: 10 s to fill caches, 0.05 s to warm up, "
    )


async def test_the_last_decisions_that_count_are_kept_of_each_run(
    service: tuple[Service, Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, str, str]]()
    clock = iter((1000.0, 2000.0))

    async def last(url: str, namespace: str) -> str:
        asked.append((url, namespace, ""))
        return f"{len(asked)}-0"

    async def records(url: str, namespace: str, *, after: str) -> list[fleet_pb2.RouteRecord]:
        asked.append((url, namespace, after))
        # Every 50 ms from the beginning: of 0 to 0.25 s what is from 0.05 s on counts.
        began = 1000.0 if after == "1-0" else 2000.0
        moments = [int(1000 * began) + 50 * step for step in range(8)]
        return [fleet_pb2.RouteRecord(policy="prefix", decided_unix_ms=moment) for moment in moments]

    async def sent(*arguments: Any, **more: Any) -> Sent:
        return replace(await send(*arguments, **more), began_unix_s=next(clock))

    monkeypatch.setattr(routing, "last_route", last)
    monkeypatch.setattr(routing, "records_from_redis", records)
    monkeypatch.setattr(routing, "send", sent)
    made, results, _ = sweep(replace(CONFIG, routes=3), service[1])
    await made.prepare(FleetConfig(workers=1, namespace="ours"))
    for policy in CONFIG.policies:
        await made.run(CONFIG.scenarios[0], policy)
    assert [each.decided_unix_ms for each in results.routes] == [
        *(1_000_100, 1_000_150, 1_000_200),
        *(2_000_100, 2_000_150, 2_000_200),
    ]
    assert asked == [(URL, "ours", after) for after in ("", "1-0", "", "3-0")]


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
    assert config.most_s < 16 * 60


def test_defaults_with_simulated_workers() -> None:
    settings, config = options("--simulated")
    assert (settings.workers, settings.model) == (32, "simulated:400,100")
    assert [each.name for each in config.scenarios] == [
        *(f"ratio {ratio}" for ratio in ("0.5", "1", "2", "4", "8")),
        *("hot prefix", "hit-free"),
    ]
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


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_figures_so_far_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, interrupted: bool) -> None:
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
        main, ["bench", "routing", "--out", str(tmp_path), "--json", "--seconds", "2", "--plot", "svg"]
    )
    assert ran.exit_code == (INTERRUPTED if interrupted else 0)
    written = json.loads((tmp_path / "routing.json").read_text())
    assert json.loads(ran.stdout) == written
    assert (written["complete"], len(written["runs"])) == (not interrupted, len(RUNS))
    assert written["command"] == "octavo bench routing --seconds 2"
    assert ("Interrupted" in (tmp_path / "routing.md").read_text()) is interrupted
    assert (tmp_path / "routing.svg").read_text().startswith("<?xml")
    assert (tmp_path / "routes.jsonl").read_text() == '{"policy": "prefix"}\n'


def test_a_sweep_without_an_answer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are kept all the same."""
    given_up = Sample(1.0, 0.0, 9, UNANSWERED, 4.0)

    async def some(_config: object, _settings: object, results: Results, _note: object) -> None:
        results.facts = {**FACTS, **results.facts}
        results.runs += [made_run(policy, 2.0, 3.0, given_up) for policy in ("prefix", "least-loaded")]
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
