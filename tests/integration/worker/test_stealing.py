"""Jobs that a full worker can't read yet are run by a free one, with the same answers."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.jobs import JobState
from kvstore.registry import Load, Registry
from tests.integration.kvstore.proxy import Proxy
from tests.integration.worker.one_worker import LONG, Fleet, by_choice, running_worker
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.client import Broker
    from worker.step import StepOutput

JOBS = 10
TOKENS = 40


def prompt_of(index: int) -> list[int]:
    return [3 + index, *range(5, 25 + index)]


@pytest.fixture(autouse=True)
def hardly_reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with one place is full with two jobs."""
    monkeypatch.setattr("worker.intake.READ_AHEAD", 1)


@asynccontextmanager
async def two_workers(
    full: Broker,
    free: Broker,
    model_dir: Path,
    tmp_path: Path,
    *,
    most: int = 1,
    dtype: str = "float32",
    steal: tuple[bool, bool] = (True, True),
) -> AsyncIterator[tuple[Fleet, Fleet]]:
    """One with at most so many places, and one with eight."""
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(
                running_worker(full, model_dir, tmp_path, name="full", dtype=dtype, max_running=most, steal=steal[0])
            ),
            await stack.enter_async_context(
                running_worker(free, model_dir, tmp_path, name="free", dtype=dtype, max_running=8, steal=steal[1])
            ),
        )


async def submit_all(fleet: Fleet) -> None:
    for index in range(JOBS):
        prompt = prompt_of(index)
        await fleet.submit(f"r{index}", prompt, TOKENS, seed=index, n=1 + index % 2, prefill=len(prompt))


async def answers(fleet: Fleet, turn: str = "r") -> list[dict[int, list[int]]]:
    return [by_choice(await fleet.ended(f"{turn}{index}")) for index in range(JOBS)]


async def solo(fleet: Fleet) -> list[dict[int, list[int]]]:
    """The same jobs, one at a time."""
    found = []
    for index in range(JOBS):
        await fleet.submit(f"solo{index}", prompt_of(index), TOKENS, seed=index, n=1 + index % 2)
        found.append(by_choice(await fleet.ended(f"solo{index}")))
    return found


async def loads(fleet: Fleet) -> list[Load]:
    registry = Registry(fleet.broker)
    return [*(await registry.loads(await registry.workers())).values()]


async def test_a_free_worker_runs_what_waits_for_a_full_one(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with two_workers(broker, broker, model_dir, tmp_path) as (full, free):
        expected = await solo(free)
        await submit_all(full)
        assert await answers(full) == expected
        stolen = free.metrics.get_sample_value("octavo_stolen_total")
        assert stolen
        assert full.metrics.get_sample_value("octavo_stolen_total") == 0
        moved = 0
        for index in range(JOBS):
            record = await full.jobs.get(f"r{index}")
            assert record is not None
            assert (record.worker, record.stolen_from) in (("full", ""), ("free", "full"))
            assert record.attempt == 1
            assert (await full.log(f"r{index}"))[0].route.worker == record.worker
            moved += bool(record.stolen_from)
        assert moved == stolen
        await full.idle()
        await free.idle()
        assert await loads(full) == [Load(), Load()]


async def test_long_prompts_are_shared_though_there_are_places(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts of half a second each at one worker, another one has nothing to do."""
    monkeypatch.setattr("worker.intake.READ_AHEAD_S", 0.5)
    prompts = [[2 + index, *range(5, 63)] * 5 for index in range(8)]
    async with two_workers(broker, broker, Path("simulated:600,1"), tmp_path, most=8, dtype="auto") as (full, free):
        for index, prompt in enumerate(prompts):
            await full.submit(f"r{index}", prompt, 5, prefill=len(prompt))
        found = [by_choice(await full.ended(f"r{index}")) for index in range(8)]
        workers = [(await full.log(f"r{index}"))[0].route.worker for index in range(8)]
        assert workers[0] == "full"
        assert workers.count("free") == free.metrics.get_sample_value("octavo_stolen_total")
        assert workers.count("free") >= 2
        for index, prompt in enumerate(prompts[:4]):
            other = free if workers[index] == "full" else full
            await other.submit(f"again{index}", prompt, 5)
            assert by_choice(await other.ended(f"again{index}")) == found[index]


async def test_charges_are_those_of_the_jobs_while_they_move(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    """However often one looks, both workers together are charged what the live jobs are."""
    async with two_workers(broker, broker, model_dir, tmp_path) as (full, free):
        await submit_all(full)
        live = JOBS
        while live:
            before = await states(full)
            seen = await loads(full)
            after = await states(full)
            if before == after:  # none ended or moved meanwhile
                live = sum(state is not JobState.ENDED for state, _ in after)
                assert sum(load.jobs for load in seen) == live
            await asyncio.sleep(0)
        assert free.metrics.get_sample_value("octavo_stolen_total")


async def states(fleet: Fleet) -> list[tuple[JobState, str]]:
    records = [await fleet.jobs.get(f"r{index}") for index in range(JOBS)]
    return [(record.state, record.worker) for record in records if record is not None]


@pytest.mark.parametrize("steal", [(False, True), (True, False)])
async def test_neither_takes_part_that_was_told_not_to(
    broker: Broker, model_dir: Path, tmp_path: Path, steal: tuple[bool, bool]
) -> None:
    async with two_workers(broker, broker, model_dir, tmp_path, steal=steal) as (full, free):
        await submit_all(full)
        await answers(full)
        assert free.metrics.get_sample_value("octavo_stolen_total") == 0
        assert {(await full.log(f"r{index}"))[0].route.worker for index in range(JOBS)} == {"full"}


async def test_a_lost_reply_to_a_theft_loses_no_job(
    broker: Broker, model_dir: Path, tmp_path: Path, namespace: str
) -> None:
    async with Proxy(broker.config.url) as proxy:
        through = await connect(BrokerConfig(proxy.url, namespace))
        async with two_workers(broker, through, model_dir, tmp_path) as (full, free):
            expected = await solo(free)
            proxy.lose = through._scripts["steal"].sha1.encode()
            await submit_all(full)
            assert await answers(full) == expected
            assert proxy.lost == 1
            assert free.metrics.get_sample_value("octavo_stolen_total")
            await free.idle()
            assert await loads(full) == [Load(), Load()]
        await through.close()


async def test_a_worker_is_free_when_nobody_waits_for_a_first_token(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(broker, model_dir, tmp_path, max_running=2) as fleet:
        gate, step = threading.Event(), fleet.worker.engine.step

        def gated_step() -> StepOutput:
            assert gate.wait(20)
            return step()

        async def free() -> bool:
            return fleet.loop._free()

        async def claimed() -> bool:
            return bool(fleet.loop._journal.unstarted)

        monkeypatch.setattr(fleet.worker.engine, "step", gated_step)
        assert await free()
        await fleet.submit("first", prompt_of(0), LONG)
        await until(claimed, within_s=5)
        assert not await free()
        gate.set()
        await until(free, within_s=5)  # it decodes, and has another place
        await fleet.submit("second", prompt_of(1), LONG)
        await fleet.tokens("second", 1)
        assert not await free()  # no place
        await fleet.jobs.cancel("first")
        await until(free, within_s=5)
        fleet.loop.drain()
        assert not await free()
        await fleet.jobs.cancel("second")


async def test_what_a_thief_holds_is_what_it_is_predicted_to_find(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that share the beginning of their prompts wait at a full worker; a free one has it in its cache."""
    monkeypatch.setattr("worker.stealing.MARGIN_S", 0.0)  # a tiny model is done with them in milliseconds
    shared = [7, *range(5, 52)]  # three blocks
    async with two_workers(broker, broker, model_dir, tmp_path) as (full, free):
        knows_what_it_holds(free)
        await free.submit("warm", [*shared, 9], 1)
        await free.ended("warm")
        gate, step = threading.Event(), full.worker.engine.step

        def gated_step() -> StepOutput:
            assert gate.wait(20)
            return step()

        async def some_stolen() -> bool:
            return (free.metrics.get_sample_value("octavo_stolen_total") or 0) >= 3

        monkeypatch.setattr(full.worker.engine, "step", gated_step)
        for index in range(JOBS):
            prompt = [*shared, *prompt_of(index)]
            await full.submit(f"r{index}", prompt, TOKENS, seed=index, prefill=len(prompt))
        await until(some_stolen, within_s=15)
        gate.set()
        found = await answers(full)
        records = [await full.jobs.get(f"r{index}") for index in range(JOBS)]
        moved = {record.request_id: record for record in records if record is not None and record.stolen_from}
        assert len(moved) == free.metrics.get_sample_value("octavo_stolen_total")
        assert {(record.predicted, record.cached_tokens) for record in moved.values()} == {(48, 48)}
        for index in range(JOBS):
            other = full if f"r{index}" in moved else free
            await other.submit(f"again{index}", [*shared, *prompt_of(index)], TOKENS, seed=index)
            assert by_choice(await other.ended(f"again{index}")) == found[index]
        await full.idle()
        await free.idle()
        assert await loads(full) == [Load(), Load()]


async def test_what_comes_of_one_theft_is_known_at_the_next(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has anything of them yet: the first one that is taken is computed, in 0.8 s; others find half of it."""
    monkeypatch.setattr("worker.intake.READ_AHEAD_S", 0.5)
    shared = [*range(5, 65)] * 4  # 15 blocks
    async with two_workers(broker, broker, Path("simulated:600,1"), tmp_path, most=8, dtype="auto") as (full, free):
        knows_what_it_holds(free)
        for index in range(12):
            prompt = [*shared, 2 + index, *range(5, 64), *shared[60:]]
            await full.submit(f"r{index}", prompt, 5, prefill=len(prompt))
        records = []
        for index in range(12):
            await full.ended(f"r{index}")
            records.append(await full.jobs.get(f"r{index}"))
        moved = [record for record in records if record is not None and record.stolen_from]
        assert len(moved) > 1
        assert [record.predicted for record in moved] == [record.cached_tokens for record in moved]
        assert [record.predicted for record in moved] == [0] + [240] * (len(moved) - 1)


def knows_what_it_holds(fleet: Fleet) -> None:
    fleet.loop._stealing._overlaps._offered = fleet.loop._held.offered
