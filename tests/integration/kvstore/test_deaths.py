"""Jobs that workers die of: who is counted, and when a job is given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.dead import DeadJobs
from kvstore.jobs import Commit, JobState, Rehomed, Target
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Ear, Stage, chunk, job, settled

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.orphans import Orphan
    from kvstore.registry import WorkerInfo

MOVED, DEAD = Rehomed.MOVED, Rehomed.DEAD


@pytest.fixture(autouse=True)
async def _settled(broker: Broker) -> None:
    await settled(broker)


async def found(stage: Stage, request_id: str) -> Orphan:
    (orphan,) = [each for each in await stage.jobs.orphans() if each.request_id == request_id]
    return orphan


async def test_a_job_that_kills_its_workers_is_given_up_with_the_third(mortal: Stage, broker: Broker) -> None:
    poison = job("poison")
    worker = await mortal.worker("w0")
    await mortal.running("poison", worker)
    for number in (1, 2):
        await mortal.perish(worker)
        orphan = await found(mortal, "poison")
        assert (orphan.deaths, orphan.attempt, orphan.doomed) == (number, number, False)
        worker = await mortal.worker(f"w{number}")
        assert await mortal.rehome(worker) == {"poison": MOVED}
        assert (await mortal.record("poison")).deaths == number
        await mortal.claim(worker)
    await mortal.perish(worker)
    orphan = await found(mortal, "poison")
    assert (orphan.deaths, orphan.attempt, orphan.doomed) == (3, 3, True)
    other = await mortal.worker("w3")
    async with Ear(broker, mortal.gateway) as gateway:
        assert await mortal.rehome(other) == {"poison": DEAD}
        (delivery,) = await gateway.deliveries()
    assert (delivery.failure, delivery.chunk.finish) == (job_pb2.FAILURE_DEAD, inference_pb2.ERROR)
    assert delivery.chunk.error == "3 workers died while they ran it"
    assert await mortal.log("poison") == [delivery]
    record = await mortal.record("poison")
    assert (record.state, record.deaths, record.attempt) == (JobState.ENDED, 3, 3)
    (dead,) = await DeadJobs(broker).all()
    assert 0 <= dead.died_unix_ms - orphan.seen_ms < 60_000
    dead.died_unix_ms = 0
    assert dead == job_pb2.DeadJob(job=poison, reason="3 workers died while they ran it", attempts=3, worker="w2")
    assert (await mortal.load(worker), await mortal.load(other)) == ((0, 0), (0, 0))
    assert (await mortal.jobs.ledger()).dead == 1
    assert (await mortal.jobs.ledger()).holds


async def test_it_is_given_up_where_there_is_no_other_worker_too(mortal: Stage) -> None:
    for _ in range(3):
        worker = await mortal.worker()
        await (mortal.rehome(worker) if await mortal.jobs.get("poison") else mortal.submit("poison", worker))
        assert len(await mortal.claim(worker)) == 1
        await mortal.perish(worker)
    assert await mortal.rehome(None) == {"poison": DEAD}


async def test_who_did_nothing_is_no_suspect(mortal: Stage) -> None:
    """Jobs that were not claimed, or had many tokens of the life that died."""
    for number in range(4):
        worker = await mortal.worker("w0")
        if number == 0:
            await mortal.submit("talks", worker, n=2)
            await mortal.submit("waits", worker)
        (claim,) = [each for each in await claim_some(mortal, worker, "talks") if each.job.request_id == "talks"]
        assert claim.attempt == number + 1
        steps = [chunk("talks", claim.next[one], [7] * 16, choice=one, attempt=claim.attempt) for one in (0, 1)]
        assert await mortal.commit(worker, *steps) == [Commit.WRITTEN] * 2
        await mortal.perish(worker)
        assert {each.request_id: each.deaths for each in await mortal.jobs.orphans()} == {"talks": 0, "waits": 0}
        successor = await mortal.worker("w0")
        await mortal.rehome(successor)
        await mortal.perish(successor)
    # Without a token more, the life that had it last is counted, and those before are not.
    worker = await mortal.worker("w0")
    await claim_some(mortal, worker, "talks")
    await mortal.perish(worker)
    assert (await found(mortal, "talks")).deaths == 1


async def test_a_job_that_kills_after_a_token_of_each_life_is_given_up_with_the_fourth(mortal: Stage) -> None:
    """Its neighbour, with a token of each life too, is not: it is not with it from the third on."""
    worker = await mortal.worker("w0")
    await mortal.running("poison", worker)
    await mortal.running("neighbour", worker)
    for number in range(1, 5):
        beside = ("poison", "neighbour") if number < 3 else ("poison",)
        tokens = [chunk(each, number - 1, [7], attempt=number) for each in beside]
        assert await mortal.commit(worker, *tokens) == [Commit.WRITTEN] * len(beside)
        await mortal.perish(worker)
        poison = await found(mortal, "poison")
        assert (poison.deaths, poison.fruitless, poison.doomed) == (number, 0, number == 4)
        worker = await mortal.worker(f"w{number}")
        assert await move(mortal, "poison", worker) is (MOVED if number < 4 else DEAD)
        assert await move(mortal, "neighbour", worker) is (MOVED if number in (1, 4) else Rehomed.WAITING)
        await mortal.claim(worker)
    assert (await mortal.log("poison"))[-1].chunk.error == "4 workers died while they ran it"
    (dead,) = await DeadJobs(mortal.broker).all()
    assert (dead.attempts, dead.reason) == (4, "4 workers died while they ran it")
    assert await mortal.commit(worker, chunk("neighbour", 2, [7], attempt=3)) == [Commit.WRITTEN]


async def move(stage: Stage, request_id: str, worker: WorkerInfo) -> Rehomed:
    return await stage.jobs.rehome(await found(stage, request_id), Target(worker.id, worker.incarnation, 0, 0))


async def claim_some(stage: Stage, worker: WorkerInfo, *wanted: str) -> list[Any]:
    """Reads all, rehomes what earlier lives had read, and claims only the wanted."""
    await stage.rehome(worker)
    entries = [entry for entry in await stage.entries(worker) if entry.request_id in wanted]
    return await stage.jobs.claim(worker.id, worker.incarnation, entries)


async def test_workers_that_said_goodbye_have_not_died(mortal: Stage) -> None:
    for number in range(4):
        worker = await mortal.worker(f"w{number}")
        await (mortal.submit("r1", worker) if number == 0 else mortal.rehome(worker))
        assert [claim.attempt for claim in await mortal.claim(worker)] == [number + 1]
        await mortal.registry.leave(worker.id, worker.incarnation)
        orphan = await found(mortal, "r1")
        assert (orphan.deaths, orphan.doomed) == (0, False)


async def test_what_ten_workers_in_a_row_get_no_token_of_is_given_up(mortal: Stage) -> None:
    """None of them died of it; and one that gets a token ends the row, which is begun afresh."""
    worker = await mortal.worker()
    await mortal.submit("r1", worker)
    for attempt in range(1, 12 + 10):
        (claim,) = await mortal.claim(worker)
        assert claim.attempt == attempt
        if attempt <= 12:
            assert await mortal.commit(worker, chunk("r1", attempt - 1, [1], attempt=attempt)) == [Commit.WRITTEN]
        await mortal.registry.leave(worker.id, worker.incarnation)
        orphan = await found(mortal, "r1")
        assert (orphan.deaths, orphan.fruitless) == (0, max(attempt - 12, 0))
        worker = await mortal.worker("w1" if worker.id == "w0" else "w0")
        assert await mortal.rehome(worker) == {"r1": MOVED}
    await mortal.claim(worker)
    await mortal.registry.leave(worker.id, worker.incarnation)
    assert await mortal.rehome(None) == {"r1": DEAD}
    message = "10 workers in a row ran it, and none got a token of it"
    assert (await mortal.log("r1"))[-1].chunk.error == message
    (dead,) = await DeadJobs(mortal.broker).all()
    assert (dead.attempts, dead.reason) == (22, message)
