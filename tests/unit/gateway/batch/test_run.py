"""Lines on their way: all of them once, so many at a time, whatever calls say."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from gateway.batch import run as module
from gateway.batch import verdicts
from gateway.batch.journal import Journal, results
from gateway.batch.lines import Line
from gateway.batch.run import STALLED_S, TURN_S, BatchRun, Turn
from kvstore.batches import Batch, BatchState, Progress, Settings
from octavo.v1.inference_pb2 import ERROR, STOP, Chunk, GenerateRequest, GenerateResponse, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    monkeypatch.setattr(verdicts, "PAUSE_S", (0.0, 0.0))


class Fleet:
    """Stands where the client does. `script`: for a request id, what its calls raise, one after the other."""

    def __init__(self, script: dict[str, list[Exception | GenerateResponse]] | None = None) -> None:
        self.script = script or {}
        self.asked: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.cancelled: set[str] = set()
        self.running = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        self.asked.append(request.request_id)
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
            for each in self.script.pop(request.request_id, []):
                if isinstance(each, Exception):
                    raise each
                yield each
            usage = Usage(prompt_tokens=1, completion_tokens=1)
            yield GenerateResponse(chunks=[Chunk(token_ids=[5], text="x", finish=STOP)], usage=usage)
        finally:
            self.running -= 1

    async def cancel(self, request_id: str) -> bool:
        self.cancelled.add(request_id)
        return True


def error(code: grpc.StatusCode, wait_ms: int | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([("retry-after-ms", str(wait_ms))] if wait_ms is not None else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details="why")


def lines(count: int, start: int = 1) -> Iterator[Line]:
    return (Line(each, f"l{each}", "", GenerateRequest(text="x")) for each in range(start, count + 1))


class World:
    """A run of a batch, and what came of it."""

    def __init__(self, folder: Path, fleet: Fleet, count: int, in_flight: int = 3, start: int = 1) -> None:
        self.path = folder / "results.jsonl"
        self.journal = Journal(self.path)
        self.told: list[Progress] = []
        self.state: BatchState | None = BatchState.RUNNING
        self.leave = asyncio.Event()
        batch = Batch("b", BatchState.RUNNING, Settings(total=count, model="m", in_flight=0, priority=-7))
        self.others = False
        self.run = BatchRun(fleet, batch, lines(count, start), self.journal, self.tell, lambda: self.others, in_flight)

    def tell(self, progress: Progress) -> BatchState | None:
        self.told.append(progress)
        return self.state

    async def end(self) -> bool:
        try:
            return await self.run.run(self.leave)
        finally:
            self.journal.close()

    @property
    def results(self) -> dict[str, Any]:
        found = [json.loads(each) for each in results(self.path)]
        assert len({each["id"] for each in found}) == len(found)
        return {each["id"]: each for each in found}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (nothing to await)
            await asyncio.sleep(0)


async def test_every_line_is_asked_for_once_and_so_many_at_a_time(tmp_path: Path) -> None:
    fleet = Fleet()
    world = World(tmp_path, fleet, 10)
    assert await world.end()
    assert sorted(fleet.asked) == sorted(f"b.{number}" for number in range(1, 11))
    assert fleet.most == 3
    assert set(world.results) == {f"l{number}" for number in range(1, 11)}
    request = fleet.requests[0]
    assert (request.model, request.priority, request.detached) == ("m", -7, True)
    last = world.told[-1]
    assert (last.done, last.failed, last.prompt_tokens, last.completion_tokens) == (10, 0, 10, 10)


async def test_a_line_that_fails_is_a_result_and_the_others_go_on(tmp_path: Path) -> None:
    world = World(tmp_path, Fleet({"b.2": [error(grpc.StatusCode.INVALID_ARGUMENT)]}), 4)
    assert await world.end()
    assert world.results["l2"]["error"]["message"] == "why"
    assert {each for each, told in world.results.items() if "text" in told} == {"l1", "l3", "l4"}
    assert (world.told[-1].done, world.told[-1].failed) == (3, 1)


async def test_full_queues_fail_no_line(tmp_path: Path) -> None:
    full = error(grpc.StatusCode.RESOURCE_EXHAUSTED, 0)
    fleet = Fleet({"b.1": [full]})
    world = World(tmp_path, fleet, 2)
    assert await world.end()
    assert fleet.asked.count("b.1") == 2
    assert "text" in world.results["l1"]


async def test_a_job_that_ended_for_want_of_a_worker_gets_another_id(tmp_path: Path) -> None:
    gone = [
        GenerateResponse(chunks=[Chunk(token_ids=[9], text="half", finish=ERROR, error="gone")]),
        error(grpc.StatusCode.UNAVAILABLE),
    ]
    fleet = Fleet({"b.1": [*gone], "b.1.1": [*gone], "b.1.2": [*gone], "b.2": [*gone]})
    world = World(tmp_path, fleet, 2, in_flight=1)
    assert await world.end()
    assert fleet.asked == ["b.1", "b.1.1", "b.1.2", "b.2", "b.2.1"]
    assert world.results["l1"]["error"]["code"] == "unavailable"
    assert (world.results["l2"]["text"], world.results["l2"]["request_id"]) == ("x", "b.2.1")


async def test_a_cancelled_batch_ends_what_runs_and_keeps_what_is_done(tmp_path: Path) -> None:
    fleet = Fleet()
    world = World(tmp_path, fleet, 100, in_flight=2)
    ending = asyncio.create_task(world.end())
    await until(lambda: len(fleet.asked) == 8)
    fleet.gate.clear()
    await until(lambda: fleet.running == 2 and len(world.journal.tally.ids) == len(fleet.asked) - 2)
    done = len(world.journal.tally.ids)
    world.state = BatchState.CANCELLING
    assert await ending
    assert {f"b.{done + 1}", f"b.{done + 2}"} <= fleet.cancelled
    assert not {f"b.{number}" for number in range(1, done + 1)} & fleet.cancelled
    assert len(world.results) == done


async def test_what_a_killed_run_left_is_cancelled_too(tmp_path: Path) -> None:
    fleet = Fleet()
    world = World(tmp_path, fleet, 100, in_flight=2, start=5)
    await world.run.cancel_open()
    world.journal.close()
    assert fleet.cancelled == {f"b.{number}{job}" for number in (5, 6) for job in ("", ".1", ".2")}
    assert fleet.asked == []


async def test_who_leaves_cancels_nothing(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.gate.clear()
    world = World(tmp_path, fleet, 10)
    ending = asyncio.create_task(world.end())
    await until(lambda: fleet.running == 3)
    world.leave.set()
    assert not await ending
    assert (fleet.running, fleet.cancelled, world.results) == (0, set(), {})


async def test_a_batch_that_the_broker_lost_goes_on(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.gate.clear()
    world = World(tmp_path, fleet, 5)
    world.state = None
    ending = asyncio.create_task(world.end())
    await until(lambda: len(world.told) > 2)
    fleet.gate.set()
    assert await ending
    assert len(world.results) == 5


async def test_a_disk_that_is_full_ends_the_run_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet()
    world = World(tmp_path, fleet, 10)

    def full(_: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(world.journal, "append", full)
    with pytest.raises(OSError, match="no space left"):
        await world.end()
    assert fleet.running == 0
    assert fleet.cancelled == set()


def test_a_turn_ends_by_its_time_or_when_all_waits_and_nothing_ends() -> None:
    turn = Turn(100.0, ended=3, moved_s=100.0)
    assert not turn.over(3, 100.0 + STALLED_S, waits=False)
    assert turn.over(3, 100.0 + STALLED_S, waits=True)
    assert not turn.over(4, 100.0 + STALLED_S + 1, waits=True)  # one more has ended
    assert not turn.over(4, 100.0 + 2 * STALLED_S, waits=True)
    assert turn.over(4, 101.0 + 2 * STALLED_S, waits=True)
    assert not turn.over(5, 99.9 + TURN_S, waits=False)
    assert turn.over(6, 100.0 + TURN_S, waits=False)


async def test_after_its_turn_it_gives_way_to_others_and_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.01)
    fleet = Fleet({"b.2": [error(grpc.StatusCode.RESOURCE_EXHAUSTED, 60_000)]})
    world = World(tmp_path, fleet, 3)
    running = asyncio.create_task(world.end())
    moment = time.monotonic() + 0.1
    await until(lambda: time.monotonic() > moment)  # some turns
    assert not running.done()
    world.others = True
    assert not await running
    assert world.results.keys() == {"l1", "l3"}
    assert world.told[-1].trouble == "RESOURCE_EXHAUSTED: why"
    assert fleet.cancelled == set()
