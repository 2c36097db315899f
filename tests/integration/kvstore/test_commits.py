"""What a worker commits: written once, in order, for one's own jobs only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import CommitGap
from kvstore.jobs import Commit, Entry, Finished, JobState
from kvstore.registry import new_incarnation
from kvstore.token_log import MAX_BYTES, encode
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Ear, Stage, chunk, job, on_both_servers

if TYPE_CHECKING:
    from kvstore.client import Broker

pytestmark = on_both_servers


async def test_one_commit_for_many_jobs_and_gateways(stage: Stage, broker: Broker) -> None:
    worker, other = await stage.worker(), new_incarnation()
    for number in range(4):
        await stage.submit(f"r{number}", worker, gateway=stage.gateway if number % 2 else other)
    assert len(await stage.claim(worker)) == 4
    step = [chunk(f"r{number}", 0, [number]) for number in range(4)]
    async with Ear(broker, stage.gateway) as odd, Ear(broker, other) as even:
        assert await stage.commit(worker, *step) == [Commit.WRITTEN] * 4
        # One message for each gateway.
        assert await odd.deliveries() == [step[1], step[3]]
        assert await even.deliveries() == [step[0], step[2]]
        assert odd.silent()
        assert even.silent()


async def test_several_chunks_of_one_job_in_one_commit(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    step = [chunk("r1", 0, [1]), chunk("r1", 1, [2]), chunk("r1", 2, [], finish=inference_pb2.LENGTH)]
    assert await stage.commit(worker, *step) == [Commit.WRITTEN] * 3
    assert await stage.log("r1") == step


async def test_what_is_not_ones_own_is_fenced(stage: Stage) -> None:
    worker, other = await stage.worker(), await stage.worker("w1")
    await stage.running("r1", worker)
    await stage.submit("queued", worker)
    results = {
        "another attempt": await stage.commit(worker, chunk("r1", 0, [1], attempt=2)),
        "another owner": await stage.commit(other, chunk("r1", 0, [1])),
        "not claimed": await stage.commit(worker, chunk("queued", 0, [1])),
        "attempt 0": await stage.commit(worker, chunk("queued", 0, [1], attempt=0)),
        "unknown": await stage.commit(worker, chunk("r2", 0, [1])),
    }
    assert set(map(tuple, results.values())) == {(Commit.FENCED,)}, results
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    assert await stage.commit(worker, chunk("r1", 0, [1])) == [Commit.FENCED]
    assert [delivery.chunk.finish for delivery in await stage.log("r1")] == [inference_pb2.CANCELLED]


async def test_a_gap_is_an_error_and_spares_the_others(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("good", worker)
    await stage.submit("bad", worker)
    await stage.claim(worker)
    await stage.commit(worker, chunk("bad", 0, [1, 2]))
    wrong = {
        "ahead": chunk("bad", 3, [9]),
        "overlapping": chunk("bad", 1, [2, 3]),
        "written before, now with a finish": chunk("bad", 0, [1, 2], finish=inference_pb2.STOP),
    }
    for number, (case, bad) in enumerate(wrong.items()):
        with pytest.raises(CommitGap) as caught:
            await stage.commit(worker, bad, chunk("good", number, [number]))
        assert caught.value.expected == {"bad": {0: 2}}, case
    assert [delivery.chunk.token_ids for delivery in await stage.log("good")] == [[0], [1], [2]]
    assert [delivery.chunk.token_ids for delivery in await stage.log("bad")] == [[1, 2]]


async def test_nothing_comes_after_the_end(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await stage.commit(worker, chunk("r1", 0, [1], finish=inference_pb2.STOP))
    with pytest.raises(CommitGap):
        await stage.commit(worker, chunk("r1", 1, [2]))
    assert len(await stage.log("r1")) == 1


async def test_refused_before_anything_is_written(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    with pytest.raises(ValueError, match="neither tokens nor finish"):
        await stage.commit(worker, chunk("r1", 0, [1]), chunk("r1", 1, []))
    assert await stage.log("r1") == []
    too_many = job_pb2.Job(request_id="r", prompt_token_ids=[1], n=33)
    for broken in (job_pb2.Job(), job_pb2.Job(request_id="r2"), too_many):
        with pytest.raises(ValueError, match=r"a request id and a prompt|n is 33, of 32 at most"):
            await stage.jobs.submit(
                broken,
                digest=b"",
                worker="w0",
                worker_incarnation=worker.incarnation,
                gateway="",
                deadline_ms=None,
                max_queue=1,
            )


async def test_megabytes_reach_the_gateway_in_messages_that_it_takes(stage: Stage, broker: Broker) -> None:
    """As large as first chunks with the log-probabilities of long prompts are, all in one commit."""
    worker = await stage.worker()
    step = []
    for number in range(12):
        await stage.submit(f"r{number}", worker)
        first = chunk(f"r{number}", 0, [number])
        first.chunk.text = "x" * 1_500_000
        step.append(first)
    assert sum(len(encode([each])) for each in step) > MAX_BYTES
    await stage.claim(worker)
    async with Ear(broker, stage.gateway) as ear:
        assert await stage.commit(worker, *step) == [Commit.WRITTEN] * 12
        heard: list[job_pb2.Delivery] = []
        while len(heard) < 12:
            heard += await ear.deliveries()
        assert ear.silent()
    assert heard == step
    assert await stage.log("r11") == [step[11]]
    assert broker.malformed == 0


async def test_hostile_values_do_not_break_a_step(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    for request_id in ("job", "log", "number", "good"):
        await stage.submit(request_id, worker)
    await stage.claim(worker)
    await broker.call("SET", broker.keys.job("job"), "no hash")
    await broker.call("SET", broker.keys.log("log"), "no stream")
    await broker.call("HSET", broker.keys.job("number"), "next:0", "1e999")
    step = [chunk(request_id, 0, [1]) for request_id in ("job", "log", "good")]
    with pytest.raises(CommitGap) as caught:
        await stage.commit(worker, *step)
    assert caught.value.expected == {"log": {0: 0}}
    # What was there is gone: the log is one again.
    assert await stage.commit(worker, *step) == [Commit.FENCED, Commit.WRITTEN, Commit.DUPLICATE]
    assert await stage.commit(worker, chunk("number", 0, [1])) == [Commit.FENCED]
    assert await stage.jobs.cancel("job") is Finished.UNKNOWN
    assert await stage.jobs.cancel("log") is Finished.ENDED
    assert [delivery.chunk.finish for delivery in await stage.log("log")] == [0, inference_pb2.CANCELLED]
    # The job that was overwritten leaves its entry and its charge: the worker's own reading removes the first.
    await broker.call("DEL", broker.keys.job("job"))
    entries = await stage.jobs.next_entries(stage.reader, worker.id, "another", 10, 1)
    assert entries == []
    pending = await broker.call("XRANGE", broker.keys.jobs("w0"), "-", "+")
    leftovers = [Entry(entry_id.decode(), fields[b"request"].decode()) for entry_id, fields in pending]
    await stage.jobs.claim(worker.id, worker.incarnation, leftovers)
    assert await stage.load(worker) == (2, 20)
    await broker.call("DEL", broker.keys.load("w0", worker.incarnation))


async def test_large_numbers_stay_exact(stage: Stage, broker: Broker) -> None:
    """Lua writes 14 digits by itself; a charge is up to 2^38, a token index up to 2^32 - 1."""
    worker = await stage.worker()
    big = job("r1", 32)
    big.stopping.max_tokens = 2**32 - 1
    await stage.jobs.submit(
        big,
        digest=b"",
        worker=worker.id,
        worker_incarnation=worker.incarnation,
        gateway="",
        deadline_ms=None,
        max_queue=10,
    )
    await stage.submit("r2", worker)
    assert await stage.load(worker) == (2, 3 + 32 * (2**32 - 1) + 10)
    await stage.claim(worker)
    await broker.call("HSET", broker.keys.job("r1"), "next:0", 2**32 - 3)
    assert await stage.commit(worker, chunk("r1", 2**32 - 3, [1, 2])) == [Commit.WRITTEN]
    record = await stage.record("r1")
    assert record.next == {0: 2**32 - 1} | dict.fromkeys(range(1, 32), 0)
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    assert await stage.load(worker) == (1, 10)


async def test_a_log_of_a_wrong_type_is_a_gap_where_the_job_stands(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    assert await stage.commit(worker, chunk("r1", 0, [1, 2])) == [Commit.WRITTEN]
    await broker.call("DEL", broker.keys.log("r1"))
    await broker.call("SET", broker.keys.log("r1"), "no stream")
    for _ in range(2):
        with pytest.raises(CommitGap) as caught:
            await stage.commit(worker, chunk("r1", 2, [3], finish=inference_pb2.STOP))
        assert caught.value.expected == {"r1": {0: 2}}
        assert await stage.log("r1") == []
        record = await stage.record("r1")
        assert (record.state, record.next, record.ends) == (JobState.RUNNING, {0: 2}, {})
        await broker.call("SET", broker.keys.log("r1"), "no stream")
    await broker.call("DEL", broker.keys.log("r1"))
    last = chunk("r1", 2, [], finish=inference_pb2.ERROR)
    assert await stage.commit(worker, last) == [Commit.WRITTEN]
    assert await stage.log("r1") == [last]
