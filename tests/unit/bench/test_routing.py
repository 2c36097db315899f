"""The sweep: what is run in which order, and what is kept. No fleet."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import pytest

from bench import routing
from bench.routing import Results, RoutingConfig, Sweep
from bench.routing_client import Sent, send
from bench.routing_load import GroupedLoad, scenarios
from bench.workload import Lengths
from octavo.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from ops.client import Client
from ops.config import FleetConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
    assert measured.most_s == pytest.approx(CONFIG.most_s + 60 + routing.MOST_CALIBRATION_S + routing.SETTLE_S)
    assert CONFIG.told() == (
        "6 runs: 0 s to fill caches, 0.05 s to warm up, 0.2 s that count and up to 5 s to drain; at most 3 min once "
        "the fleet has started; Ctrl-C ends it with the figures so far"
    )
    assert measured.told().startswith(
        "20 to 120 s to measure what the fleet answers without hits, then 6 runs: 10 s to fill caches, "
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
