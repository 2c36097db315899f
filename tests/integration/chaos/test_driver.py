"""Clients of real gateways with scripted workers, and what is read afterwards: histories that the checker takes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from bench.chaos.checker import check, figures, oracle_of
from bench.chaos.driver import Driver, Habits
from bench.chaos.evidence import Rules, Run
from bench.chaos.history import ATTACH, BAD, CANCEL, GENERATE, Recorder, Request, gather
from bench.chaos.snapshot import is_idle, is_quiet, pools, scrape, snapshot
from bench.chaos.traffic import GREEDY, Payload, bad_payloads
from kvstore.embedded import find_server
from octavo.v1 import inference_pb2
from octavo.v1.inference_pb2 import GenerateRequest, GetModelRequest, Sampling, TokenIds
from tests.integration.gateway.harness import running_gateway
from tests.integration.gateway.scripted import ScriptedWorker, chunk
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from gateway.server import Gateway
    from kvstore.client import Broker


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here."""
    return find_server()


def payload(*prompt: int) -> Payload:
    """Of one choice, as scripted workers answer."""
    return Payload(GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=Sampling(temperature=0.0)), GREEDY)


class Stage:
    """Two gateways, a scripted worker, and a client of both."""

    def __init__(self, broker: Broker, worker: ScriptedWorker, gateways: list[Gateway], metrics: list[str]) -> None:
        self.broker, self.worker, self.gateways, self.metrics = broker, worker, gateways, metrics
        self.driver: Driver

    async def evidence(self, oracle: dict[str, Any]) -> Run:
        """What is there when all is quiet."""

        async def quiet() -> bool:
            return await is_quiet(self.broker)

        await until(quiet, within_s=10)
        scrapes = {}
        for address in self.metrics:
            page = await scrape(address)
            assert page is not None
            scrapes[address] = (page,)
        return Run(self.requests(), oracle, await snapshot(self.broker), await pools(self.broker), scrapes)

    def requests(self) -> dict[str, Request]:
        return gather(self.driver.recorder.events)


@asynccontextmanager
async def set_stage(broker: Broker, **habits: Any) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        worker = ScriptedWorker(broker, kv_tokens=160, block_size=16, blocks_free=10)
        await worker.start()
        stack.push_async_callback(worker.stop)
        gateways, metrics, targets = [], [], []
        for _ in range(2):
            gateway, ready, client = await stack.enter_async_context(running_gateway(broker))
            await client.get_model(GetModelRequest())
            gateways.append(gateway)
            metrics.append(ready.metrics)
            targets.append(ready.grpc)
        stage = Stage(broker, worker, gateways, metrics)
        recorder = Recorder()
        driver = Driver(targets, recorder, seed=1, habits=Habits(**{"deadline_s": 20.0, **habits}))
        stage.driver = await stack.enter_async_context(driver)
        yield stage


async def test_a_run_without_faults_is_an_oracle_and_has_no_findings(broker: Broker) -> None:
    async with set_stage(broker) as stage:
        stage.worker.serve(tokens=4)
        asked = [payload(5, 6, number) for number in range(6)]
        await stage.driver.ask_each(asked)
        oracle = oracle_of(stage.requests().values())
        assert set(oracle) == {each.digest for each in asked}
        assert {answer.choices[0].tokens for answer in oracle.values()} == {(2, 3, 4, 5)}
        await stage.driver.ask_each(asked * 2)
        await stage.driver.probe(asked)
        run = await stage.evidence(oracle)
        assert check(run, Rules()) == []
        counted = figures(run, [])
        assert (counted.requests, counted.accepted, counted.finished, counted.tokens) == (20, 20, 20, 80)
        assert len(run.broker.jobs) == len(run.broker.logs) == 20
        assert [(entry.attempt, entry.start, entry.tokens) for entry in run.broker.logs["r0"]] == [
            (1, index, (index + 2,)) for index in range(4)
        ]
        (pool,) = run.pools
        assert (pool.total, pool.free) == (10, 10)
        assert await is_idle(broker)


async def test_a_worker_that_is_busy_by_its_lease_is_not_idle(broker: Broker) -> None:
    for what in ("running", "waiting", "blocks_used"):
        worker = ScriptedWorker(broker, **{what: 1})
        await worker.start()
        assert await is_quiet(broker)
        assert not await is_idle(broker)
        await worker.stop()
    assert await is_idle(broker)


async def test_a_gateway_that_stops_is_left_for_another(broker: Broker) -> None:
    async with set_stage(broker) as stage:
        sending = asyncio.create_task(stage.driver.send(payload(5, 6)))
        (claim,) = await stage.worker.claim()
        await stage.worker.commit(chunk(claim, 0, [2]))
        await until(lambda: came(stage, 1), within_s=5)
        target = stage.requests()["r0"].calls[0].began.target
        first = stage.driver._targets.index(target)
        hurry = asyncio.Event()
        hurry.set()
        await stage.gateways[first].stop(hurry)
        await until(lambda: called(stage, 2), within_s=10)
        await stage.worker.commit(chunk(claim, 1, [3, 4], finish=inference_pb2.STOP))
        assert await sending == "r0"
        request = stage.requests()["r0"]
        assert [(call.began.verb, call.status) for call in request.calls] == [(GENERATE, "UNAVAILABLE"), (ATTACH, "OK")]
        assert request.calls[1].began.target != target
        assert request.calls[1].began.after == {0: 1}
        assert [token for one in request.calls[1].chunks for token in one.tokens] == [3, 4]


async def called(stage: Stage, calls: int) -> bool:
    """Whether so many calls have begun."""
    return len(stage.requests()["r0"].calls) >= calls


async def came(stage: Stage, calls: int) -> bool:
    """Whether the last of so many calls has brought something."""
    request = stage.requests()["r0"]
    return len(request.calls) >= calls and bool(request.calls[calls - 1].chunks)


async def test_a_cancel_is_recorded_and_right(broker: Broker) -> None:
    async with set_stage(broker) as stage:
        sending = asyncio.create_task(stage.driver.send(payload(5, 6), cancel_at=2))
        (claim,) = await stage.worker.claim()
        await stage.worker.commit(chunk(claim, 0, [2, 3]))
        assert await stage.worker.told_to_drop() == "r0"
        await sending
        request = stage.requests()["r0"]
        stream, cancel = request.calls
        assert (stream.status, [one.finish for one in stream.chunks]) == ("OK", ["", "CANCELLED"])
        assert cancel.began.verb == CANCEL
        assert cancel.ended is not None
        assert (cancel.ended.status, cancel.ended.cancelled) == ("OK", True)
        stage.worker.serve(tokens=4)
        await stage.driver.send(payload(5, 6))
        oracle = oracle_of([stage.requests()["r1"]])
        assert check(await stage.evidence(oracle), Rules()) == []


async def test_bad_input_is_refused_as_it_should_be(broker: Broker) -> None:
    async with set_stage(broker) as stage:
        for bad in bad_payloads():
            await stage.driver.send(bad, role=BAD)
        run = await stage.evidence({})
        assert check(run, Rules()) == []
        assert {request.calls[0].status for request in run.requests.values()} == {"INVALID_ARGUMENT"}
        assert run.broker.jobs == {}


async def test_a_lost_request_and_what_it_leaves_are_found(broker: Broker) -> None:
    """The checker on the real thing: a worker that takes a job and does nothing."""
    async with set_stage(broker, deadline_s=5.0) as stage:
        stage.worker.serve(tokens=4)
        await stage.driver.send(payload(5, 6))
        oracle = oracle_of(stage.requests().values())
        await broker.call("XADD", broker.keys.jobs("w0"), "*", "request", "nobody")
        await broker.call("SET", broker.keys.prefix + "odd", "value")
        await broker.call("HSET", broker.keys.load("w0", "gone"), "jobs", 1)
        left = Run(stage.requests(), oracle, await snapshot(broker))
        found = {f"{each.invariant} {each.name} {each.where}" for each in check(left, Rules())}
        assert found >= {"I4 never expires odd", "I4 charge left load:w0:gone"}
        for name in ("odd", "load:w0:gone"):
            await broker.call("DEL", broker.keys.prefix + name)


async def test_an_endpoint_that_is_not_there(unused_tcp_port_of_its_own: int) -> None:
    assert await scrape(f"127.0.0.1:{unused_tcp_port_of_its_own}") is None


@pytest.fixture
async def unused_tcp_port_of_its_own() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
