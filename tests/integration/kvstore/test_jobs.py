"""A job's life, step by step, and what it leaves in the broker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import CommitGap, QueueFull, RequestIdTaken, WorkerGone
from kvstore.jobs import Commit, Entry, Finished, Jobs, JobState, Submitted
from kvstore.keys import GROUP
from kvstore.registry import DRAINING, new_incarnation
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Ear, Stage, chunk, job, until

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo


async def test_the_whole_life(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    assert await stage.submit("r1", worker, deadline_ms=60_000) is Submitted.ACCEPTED
    assert await stage.load(worker) == (1, 10)
    record = await stage.jobs.get("r1")
    assert record is not None
    assert (record.state, record.attempt, record.owner, record.finish) == (JobState.QUEUED, 0, "", None)
    assert (record.worker, record.worker_incarnation, record.gateway) == ("w0", worker.incarnation, stage.gateway)
    assert abs(record.submitted_ms - await broker.server_time_ms()) < 5000
    assert await broker.call("PTTL", broker.keys.job("r1")) == -1

    (claim,) = await stage.claim(worker)
    assert claim.job == job("r1")
    assert (claim.attempt, claim.gateway) == (1, stage.gateway)
    assert claim.remaining_ms is not None
    assert 50_000 < claim.remaining_ms <= 60_000
    assert 0 <= claim.queued_ms < 5000

    async with Ear(broker, stage.gateway) as ear:
        first, last = chunk("r1", 0, [5, 6]), chunk("r1", 2, [7], finish=inference_pb2.STOP)
        first.route.cached_tokens = 2
        last.usage.completion_tokens = 3
        assert await _commit(stage, worker, first) == [Commit.WRITTEN]
        assert await ear.deliveries() == [first]
        record = await stage.jobs.get("r1")
        assert record is not None
        assert (record.state, record.next, record.cached_tokens) == (JobState.RUNNING, {0: 2}, 2)
        assert await _commit(stage, worker, last) == [Commit.WRITTEN]
        assert await ear.deliveries() == [last]

    assert await stage.log("r1") == [first, last]
    record = await stage.jobs.get("r1")
    assert record is not None
    assert (record.state, record.owner, record.attempt) == (JobState.ENDED, worker.incarnation, 1)
    assert (record.next, record.prompt_tokens, record.finish) == ({0: 3}, 3, inference_pb2.STOP)
    assert await stage.load(worker) == (0, 0)
    assert await broker.call("EXISTS", broker.keys.load("w0", worker.incarnation)) == 0
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 0
    assert (await broker.call("XPENDING", broker.keys.jobs("w0"), GROUP))["pending"] == 0
    for key in (broker.keys.job("r1"), broker.keys.log("r1")):
        assert 590_000 < await broker.call("PTTL", key) <= 600_000


async def test_attempts_count_claims_not_reads(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker)
    entries = await stage.entries(worker)
    claims = [await stage.jobs.claim(worker.id, worker.incarnation, entries) for _ in range(3)]
    assert claims[0] == claims[1] == claims[2]
    assert [claim.attempt for claim in claims[0]] == [1]


async def test_same_payload_attaches_and_takes_the_delivery_over(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    assert await _commit(stage, worker, chunk("r1", 0, [5])) == [Commit.WRITTEN]
    other = new_incarnation()
    async with Ear(broker, stage.gateway) as old, Ear(broker, other) as new:
        assert await stage.submit("r1", worker, gateway=other) is Submitted.ATTACHED
        assert await _commit(stage, worker, chunk("r1", 1, [6])) == [Commit.WRITTEN]
        assert await new.deliveries() == [chunk("r1", 1, [6])]
        assert old.silent()
    assert await stage.load(worker) == (1, 10)
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 1
    assert await stage.jobs.cancel("r1", gateway=stage.gateway) is Finished.FENCED
    assert await stage.jobs.cancel("r1", gateway=other) is Finished.ENDED
    # An ended job is attached to as well: its answer is in the log.
    assert await stage.submit("r1", worker) is Submitted.ATTACHED
    assert [delivery.chunk.start for delivery in await stage.log("r1")] == [0, 1, 0]


async def test_attaching_needs_no_worker(stage: Stage) -> None:
    worker = await stage.worker()
    assert not await stage.jobs.attach("r1", digest=b"digest", gateway="g2")
    assert await stage.jobs.get("r1") is None
    await stage.running("r1", worker)
    await stage.registry.leave(worker.id, worker.incarnation)
    assert await stage.jobs.attach("r1", digest=b"digest", gateway="g2")
    record = await stage.jobs.get("r1")
    assert record is not None
    assert record.gateway == "g2"
    with pytest.raises(RequestIdTaken, match="r1"):
        await stage.jobs.attach("r1", digest=b"other", gateway="g3")
    assert await stage.jobs.cancel("r1", gateway="g2") is Finished.ENDED
    assert await stage.jobs.attach("r1", digest=b"digest", gateway="g3")


async def test_another_payload_is_refused(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker)
    with pytest.raises(RequestIdTaken, match="r1"):
        await stage.submit("r1", worker, digest=b"other")
    record = await stage.jobs.get("r1")
    assert record is not None
    assert record.gateway == stage.gateway
    assert await stage.load(worker) == (1, 10)


async def test_an_id_is_free_again_after_its_retention(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    brief = Jobs(broker, retention_s=0.1)
    await stage.submit("r1", worker)
    assert await brief.cancel("r1") is Finished.ENDED

    async def gone() -> bool:
        return await stage.jobs.get("r1") is None

    await until(gone)
    assert await stage.log("r1") == []
    assert await stage.submit("r1", worker, digest=b"other") is Submitted.ACCEPTED


async def test_the_queue_is_bounded_by_what_has_not_ended(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await stage.submit("r2", worker)
    with pytest.raises(QueueFull, match="2 of 2") as caught:
        await stage.submit("r3", worker, max_queue=2)
    assert (caught.value.depth, caught.value.limit) == (2, 2)
    assert await stage.jobs.get("r3") is None
    assert await stage.jobs.cancel("r2") is Finished.ENDED
    assert await stage.submit("r3", worker, max_queue=2) is Submitted.ACCEPTED


async def test_many_gateways_together_respect_the_bound(stage: Stage) -> None:
    worker = await stage.worker()
    tries = [stage.submit(f"r{number}", worker, max_queue=7) for number in range(50)]
    answers = await asyncio.gather(*tries, return_exceptions=True)
    assert answers.count(Submitted.ACCEPTED) == 7
    assert sum(isinstance(answer, QueueFull) for answer in answers) == 43
    assert await stage.load(worker) == (7, 70)


@pytest.mark.parametrize("case", ["never there", "replaced", "draining"])
async def test_a_worker_that_takes_no_jobs(stage: Stage, broker: Broker, case: str) -> None:
    worker = await stage.worker()
    if case == "never there":
        await stage.registry.leave(worker.id, worker.incarnation)
    elif case == "replaced":
        await stage.registry.leave(worker.id, worker.incarnation)
        await stage.worker()
    else:
        await stage.registry.renew(replace(worker, state=DRAINING))
    with pytest.raises(WorkerGone, match=r"lapsed|replaced|draining"):
        await stage.submit("r1", worker)
    assert await stage.jobs.get("r1") is None
    assert await broker.call("EXISTS", broker.keys.jobs("w0")) == 0


async def test_one_commit_for_many_jobs_and_gateways(stage: Stage, broker: Broker) -> None:
    worker, other = await stage.worker(), new_incarnation()
    for number in range(4):
        await stage.submit(f"r{number}", worker, gateway=stage.gateway if number % 2 else other)
    assert len(await stage.claim(worker)) == 4
    step = [chunk(f"r{number}", 0, [number]) for number in range(4)]
    async with Ear(broker, stage.gateway) as odd, Ear(broker, other) as even:
        assert await _commit(stage, worker, *step) == [Commit.WRITTEN] * 4
        # One message for each gateway.
        assert await odd.deliveries() == [step[1], step[3]]
        assert await even.deliveries() == [step[0], step[2]]
        assert odd.silent()
        assert even.silent()


async def test_several_chunks_of_one_job_in_one_commit(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    step = [chunk("r1", 0, [1]), chunk("r1", 1, [2]), chunk("r1", 2, [], finish=inference_pb2.LENGTH)]
    assert await _commit(stage, worker, *step) == [Commit.WRITTEN] * 3
    assert await stage.log("r1") == step


async def test_what_is_not_ones_own_is_fenced(stage: Stage) -> None:
    worker, other = await stage.worker(), await stage.worker("w1")
    await stage.running("r1", worker)
    await stage.submit("queued", worker)
    results = {
        "another attempt": await _commit(stage, worker, chunk("r1", 0, [1], attempt=2)),
        "another owner": await _commit(stage, other, chunk("r1", 0, [1])),
        "not claimed": await _commit(stage, worker, chunk("queued", 0, [1])),
        "attempt 0": await _commit(stage, worker, chunk("queued", 0, [1], attempt=0)),
        "unknown": await _commit(stage, worker, chunk("r2", 0, [1])),
    }
    assert set(map(tuple, results.values())) == {(Commit.FENCED,)}, results
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    assert await _commit(stage, worker, chunk("r1", 0, [1])) == [Commit.FENCED]
    assert [delivery.chunk.finish for delivery in await stage.log("r1")] == [inference_pb2.CANCELLED]


async def test_a_gap_is_an_error_and_spares_the_others(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("good", worker)
    await stage.submit("bad", worker)
    await stage.claim(worker)
    await _commit(stage, worker, chunk("bad", 0, [1, 2]))
    wrong = {
        "ahead": chunk("bad", 3, [9]),
        "overlapping": chunk("bad", 1, [2, 3]),
        "written before, now with a finish": chunk("bad", 0, [1, 2], finish=inference_pb2.STOP),
    }
    for number, (case, bad) in enumerate(wrong.items()):
        with pytest.raises(CommitGap) as caught:
            await _commit(stage, worker, bad, chunk("good", number, [number]))
        assert caught.value.expected == {"bad": 2}, case
    assert [delivery.chunk.token_ids for delivery in await stage.log("good")] == [[0], [1], [2]]
    assert [delivery.chunk.token_ids for delivery in await stage.log("bad")] == [[1, 2]]


async def test_nothing_comes_after_the_end(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await _commit(stage, worker, chunk("r1", 0, [1], finish=inference_pb2.STOP))
    with pytest.raises(CommitGap):
        await _commit(stage, worker, chunk("r1", 1, [2]))
    assert len(await stage.log("r1")) == 1


async def test_refused_before_anything_is_written(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    with pytest.raises(ValueError, match="neither tokens nor finish"):
        await _commit(stage, worker, chunk("r1", 0, [1]), chunk("r1", 1, []))
    assert await stage.log("r1") == []
    for broken in (job_pb2.Job(), job_pb2.Job(request_id="r2"), job_pb2.Job(request_id="r", prompt_token_ids=[1], n=2)):
        with pytest.raises(ValueError, match="one choice"):
            await stage.jobs.submit(
                broken,
                digest=b"",
                worker="w0",
                worker_incarnation=worker.incarnation,
                gateway="",
                deadline_ms=None,
                max_queue=1,
            )


async def test_finish_rings_gateway_and_owner(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await _commit(stage, worker, chunk("r1", 0, [1]))
    async with Ear(broker, stage.gateway) as gateway, Ear(broker, worker.incarnation) as owner:
        done = await stage.jobs.finish(
            "r1", finish=inference_pb2.ERROR, failure=job_pb2.FAILURE_DEADLINE, error="too late", expect_attempt=1
        )
        assert done is Finished.ENDED
        (delivery,) = await gateway.deliveries()
        assert await owner.next() == b"r1"
    assert (delivery.request_id, delivery.attempt, delivery.failure) == ("r1", 0, job_pb2.FAILURE_DEADLINE)
    assert (delivery.chunk.finish, delivery.chunk.error) == (inference_pb2.ERROR, "too late")
    assert not delivery.HasField("usage")
    assert await stage.log("r1") == [chunk("r1", 0, [1]), delivery]
    record = await stage.jobs.get("r1")
    assert record is not None
    assert (record.state, record.next, record.attempt) == (JobState.ENDED, {0: 1}, 1)
    assert await stage.load(worker) == (0, 0)
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 0


async def test_finish_answers(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    late = partial(stage.jobs.finish, finish=inference_pb2.ERROR, failure=job_pb2.FAILURE_DEADLINE, error="")
    assert await late("r2") is Finished.UNKNOWN
    assert await late("r1", expect_attempt=2) is Finished.FENCED
    assert await late("r1", expect_gateway="other") is Finished.FENCED
    assert await late("r1", expect_attempt=1, expect_gateway=stage.gateway) is Finished.ENDED
    assert await late("r1") is Finished.ALREADY
    assert await stage.jobs.cancel("r1") is Finished.ALREADY
    assert len(await stage.log("r1")) == 1


@pytest.mark.parametrize("when", ["undelivered", "read", "running"])
async def test_cancel_at_each_phase(stage: Stage, broker: Broker, when: str) -> None:
    worker = await stage.worker()
    await stage.submit("other", worker)
    await stage.claim(worker)
    await stage.submit("r1", worker)
    entries = await stage.entries(worker) if when != "undelivered" else []
    if when == "running":
        await stage.jobs.claim(worker.id, worker.incarnation, entries)
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    assert await stage.jobs.claim(worker.id, worker.incarnation, entries) == []
    assert await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 10, 1) == []
    assert await stage.load(worker) == (1, 10)
    (queue,) = await stage.jobs.queues()
    assert (queue.undelivered, queue.pending) == (0, 1)


async def test_claims_leave_out_what_is_not_there(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    stream = broker.keys.jobs("w0")
    await stage.submit("vanished", worker)
    await stage.submit("good", worker)
    await broker.call("DEL", broker.keys.job("vanished"))
    await broker.call("XADD", stream, "*", "request", "never submitted", retry=False)
    await broker.call("XADD", stream, "*", "something", "else", retry=False)
    # A second entry for a job: only the one that the job names counts.
    await broker.call("XADD", stream, "*", "request", "good", retry=False)
    entries = await stage.entries(worker)
    assert [entry.request_id for entry in entries] == ["vanished", "good", "never submitted", "", "good"]
    claims = await stage.jobs.claim(worker.id, worker.incarnation, entries)
    assert [claim.job.request_id for claim in claims] == ["good"]
    assert await broker.call("XLEN", stream) == 1
    assert (await broker.call("XPENDING", stream, GROUP))["pending"] == 1
    await broker.call("DEL", broker.keys.load("w0", worker.incarnation))


async def test_a_payload_that_does_not_parse_ends_its_job(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker)
    await stage.submit("r2", worker)
    await stage.submit("r3", worker)
    await broker.call("HSET", broker.keys.job("r1"), "payload", b"\x80\x04pickle")
    await broker.call("HSET", broker.keys.job("r2"), "payload", job("another").SerializeToString())
    assert [claim.job.request_id for claim in await stage.claim(worker)] == ["r3"]
    assert broker.malformed == 2
    for request_id in ("r1", "r2"):
        (delivery,) = await stage.log(request_id)
        assert (delivery.chunk.finish, delivery.failure) == (inference_pb2.ERROR, job_pb2.FAILURE_INTERNAL)


async def test_hostile_values_do_not_break_a_step(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    for request_id in ("job", "log", "number", "good"):
        await stage.submit(request_id, worker)
    await stage.claim(worker)
    await broker.call("SET", broker.keys.job("job"), "no hash")
    await broker.call("SET", broker.keys.log("log"), "no stream")
    await broker.call("HSET", broker.keys.job("number"), "next:0", "1e999")
    step = [chunk(request_id, 0, [1]) for request_id in ("job", "log", "good")]
    assert await _commit(stage, worker, *step) == [Commit.FENCED, Commit.FENCED, Commit.WRITTEN]
    assert await _commit(stage, worker, chunk("number", 0, [1])) == [Commit.DUPLICATE]
    assert await stage.jobs.cancel("job") is Finished.UNKNOWN
    assert await stage.jobs.cancel("log") is Finished.ENDED
    assert [delivery.chunk.finish for delivery in await stage.log("log")] == [inference_pb2.CANCELLED]
    await broker.call("HDEL", broker.keys.job("number"), "next:0")
    # The job that was overwritten leaves its entry and its charge: the worker's own reading removes the first.
    await broker.call("DEL", broker.keys.job("job"))
    entries = await stage.jobs.next_entries(stage.reader, worker.id, "another", 10, 1)
    assert entries == []
    pending = await broker.call("XRANGE", broker.keys.jobs("w0"), "-", "+")
    leftovers = [Entry(entry_id.decode(), fields[b"request"].decode()) for entry_id, fields in pending]
    await stage.jobs.claim(worker.id, worker.incarnation, leftovers)
    assert await stage.load(worker) == (3, 30)
    await broker.call("DEL", broker.keys.load("w0", worker.incarnation))


async def test_deadlines_are_told_as_time_left(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("past", worker, deadline_ms=-5)
    await stage.submit("far", worker, deadline_ms=2**63)
    await stage.submit("none", worker)
    past, far, none = await stage.claim(worker)
    assert past.remaining_ms == 0
    assert far.remaining_ms is not None
    assert 10**12 - 5000 < far.remaining_ms <= 10**12
    assert none.remaining_ms is None
    record = await stage.jobs.get("far")
    assert record is not None
    assert record.remaining_ms is not None
    assert record.remaining_ms > 10**12 - 5000


async def test_large_numbers_stay_exact(stage: Stage, broker: Broker) -> None:
    """Lua writes 14 digits by itself; a charge is up to 2^33, a token index up to 2^32 - 1."""
    worker = await stage.worker()
    big = job("r1")
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
    assert await stage.load(worker) == (2, 2**32 + 2 + 10)
    await stage.claim(worker)
    await broker.call("HSET", broker.keys.job("r1"), "next:0", 2**32 - 3)
    assert await _commit(stage, worker, chunk("r1", 2**32 - 3, [1, 2])) == [Commit.WRITTEN]
    record = await stage.jobs.get("r1")
    assert record is not None
    assert record.next == {0: 2**32 - 1}
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    assert await stage.load(worker) == (1, 10)


async def test_unknown_jobs(stage: Stage) -> None:
    assert await stage.jobs.get("nobody") is None
    assert await stage.log("nobody") == []
    assert await stage.jobs.cancel("nobody") is Finished.UNKNOWN
    assert await stage.jobs.commit("w0", "i", []) == []
    assert await stage.jobs.claim("w0", "i", []) == []


async def _commit(stage: Stage, worker: WorkerInfo, *step: job_pb2.Delivery) -> list[Commit]:
    return await stage.jobs.commit(worker.id, worker.incarnation, step)
