"""A job's life, step by step, and what it leaves in the broker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import submissions
from kvstore.errors import QueueFull, RequestIdTaken, WorkerGone
from kvstore.jobs import Attached, Commit, Committed, Finished, Jobs, JobState, Submitted
from kvstore.keys import GROUP
from kvstore.registry import DRAINING, new_incarnation
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Ear, Stage, chunk, job, on_both_servers, server_time_ms, until

if TYPE_CHECKING:
    from kvstore.client import Broker

pytestmark = on_both_servers


async def test_the_whole_life(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    assert await stage.submit("r1", worker, deadline_ms=60_000) is Submitted.ACCEPTED
    assert await stage.load(worker) == (1, 10)
    record = await stage.record("r1")
    assert (record.state, record.attempt, record.owner, record.finish) == (JobState.QUEUED, 0, "", None)
    assert (record.worker, record.worker_incarnation, record.gateway) == ("w0", worker.incarnation, stage.gateway)
    assert abs(record.submitted_ms - await server_time_ms(broker)) < 5000
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
        assert await stage.commit(worker, first) == [Commit.WRITTEN]
        assert await ear.deliveries() == [first]
        record = await stage.record("r1")
        assert (record.state, record.next, record.cached_tokens) == (JobState.RUNNING, {0: 2}, 2)
        assert await stage.commit(worker, last) == [Commit.WRITTEN]
        assert await ear.deliveries() == [last]

    assert await stage.log("r1") == [first, last]
    record = await stage.record("r1")
    assert (record.state, record.owner, record.attempt) == (JobState.ENDED, worker.incarnation, 1)
    assert (record.next, record.prompt_tokens, record.finish) == ({0: 3}, 3, inference_pb2.STOP)
    assert await stage.load(worker) == (0, 0)
    assert await broker.call("EXISTS", broker.keys.load("w0", worker.incarnation)) == 0
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 0
    assert (await broker.call("XPENDING", broker.keys.jobs("w0"), GROUP))["pending"] == 0
    for key in (broker.keys.job("r1"), broker.keys.log("r1")):
        assert 590_000 < await broker.call("PTTL", key) <= 600_000


async def test_recent_decisions_are_kept_within_bounds(
    stage: Stage, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number and by size, both about: the server drops whole nodes of its stream."""
    worker = await stage.worker()
    monkeypatch.setattr(submissions, "MAX_ROUTES", 200)
    monkeypatch.setattr(submissions, "MAX_ROUTES_BYTES", 20_000)
    for number in range(450):
        await stage.submit(f"r{number}", worker, route=b"short")
    assert 200 <= await broker.call("XLEN", broker.keys.routes) < 350
    assert 0 < await broker.call("PTTL", broker.keys.routes) <= 24 * 3600 * 1000
    for number in range(30):
        await stage.submit(f"long{number}", worker, route=bytes(4000))
    assert await broker.call("XLEN", broker.keys.routes) < 100 + 30


async def test_attempts_count_claims_not_reads(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker)
    entries = await stage.entries(worker)
    claims = [await stage.jobs.claim(worker.id, worker.incarnation, entries) for _ in range(3)]
    assert claims[0] == claims[1] == claims[2]
    assert [claim.attempt for claim in claims[0]] == [1]


async def test_same_payload_attaches_and_takes_the_delivery_over(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker, caller="first")
    await stage.claim(worker)
    assert await stage.commit(worker, chunk("r1", 0, [5])) == [Commit.WRITTEN]
    other = new_incarnation()
    async with Ear(broker, stage.gateway) as old, Ear(broker, other) as new:
        assert await stage.submit("r1", worker, gateway=other, caller="second") is Submitted.ATTACHED
        assert await stage.commit(worker, chunk("r1", 1, [6])) == [Commit.WRITTEN]
        assert await new.deliveries() == [chunk("r1", 1, [6])]
        assert old.silent()
    assert await stage.load(worker) == (1, 10)
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 1
    assert await stage.jobs.cancel("r1", caller="first") is Finished.FENCED
    assert await stage.jobs.cancel("r1", caller="second") is Finished.ENDED
    # An ended job is attached to as well: its answer is in the log.
    assert await stage.submit("r1", worker) is Submitted.ATTACHED
    assert [delivery.chunk.start for delivery in await stage.log("r1")] == [0, 1, 0]


async def test_attaching_needs_no_worker(stage: Stage) -> None:
    worker = await stage.worker()
    assert await stage.jobs.attach("r1", digest=b"digest", gateway="g2") is None
    assert await stage.jobs.get("r1") is None
    await stage.submit("r1", worker, predicted=2)
    await stage.claim(worker)
    await stage.registry.leave(worker.id, worker.incarnation)
    found = await stage.jobs.attach("r1", digest=b"digest", gateway="g2", caller="second")
    assert found == Attached(Submitted.ATTACHED, "w0", 2, worker.fingerprint)
    record = await stage.record("r1")
    assert record.gateway == "g2"
    with pytest.raises(RequestIdTaken, match="r1"):
        await stage.jobs.attach("r1", digest=b"other", gateway="g3")
    assert await stage.jobs.cancel("r1", caller="second") is Finished.ENDED
    assert await stage.jobs.attach("r1", digest=b"digest", gateway="g3") == found


async def test_attaching_by_id_alone(stage: Stage) -> None:
    """Whatever the payload was: who knows the id may read the answer."""
    worker = await stage.worker()
    assert await stage.jobs.attach("r1", gateway="g2") is None
    await stage.submit("r1", worker, predicted=2)
    found = await stage.jobs.attach("r1", gateway="g2", caller="second")
    assert found == Attached(Submitted.ATTACHED, "w0", 2, worker.fingerprint)
    assert (await stage.record("r1")).gateway == "g2"
    # An empty digest is one like any other.
    with pytest.raises(RequestIdTaken, match="r1"):
        await stage.jobs.attach("r1", digest=b"", gateway="g3")
    assert await stage.jobs.cancel("r1", caller="second") is Finished.ENDED
    assert await stage.jobs.attach("r1", gateway="g3") == found


@pytest.mark.parametrize("detached", [False, True])
async def test_a_record_tells_who_ends_a_job_and_whose_model_runs_it(stage: Stage, detached: bool) -> None:
    worker = await stage.worker(fingerprint="f0")
    wanted = job("r1")
    wanted.detached = detached
    whom: dict[str, Any] = {"worker": worker.id, "worker_incarnation": worker.incarnation, "gateway": stage.gateway}
    await stage.jobs.submit(wanted, digest=b"d", deadline_ms=None, max_queue=10, **whom)
    record = await stage.record("r1")
    assert (record.detached, record.fingerprint, record.deaths) == (detached, "f0", 0)
    (claim,) = await stage.claim(worker)
    assert claim.job.detached == detached


async def test_another_payload_is_refused(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker)
    with pytest.raises(RequestIdTaken, match="r1"):
        await stage.submit("r1", worker, digest=b"other")
    record = await stage.record("r1")
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("attempt", value) for value in (b"xyz", b"-5", b"9223372036854775807", b"1099511627776")),
        *(("gateway", value) for value in (b"\xff\xfe", None)),
        *(("submitted_ms", value) for value in (b"abc", None)),
        *(("deadline_ms", value) for value in (b"abc", b"9" * 400)),
        *(("choices", value) for value in (b"abc", b"4", None)),
        *(("open", value) for value in (b"abc", b"0", b"4")),
    ],
)
async def test_a_damaged_job_is_ended_and_harms_no_other(
    stage: Stage, broker: Broker, name: str, value: bytes | None
) -> None:
    worker = await stage.worker()
    for request_id in ("good", "bad", "next"):
        await stage.submit(request_id, worker)
    key = broker.keys.job("bad")
    await broker.call("HDEL", key, name) if value is None else await broker.call("HSET", key, name, value)
    claims = await stage.claim(worker)
    assert [claim.job.request_id for claim in claims] == ["good", "next"]
    (queue,) = await stage.jobs.queues()
    assert (queue.undelivered, queue.pending) == (0, 2)
    assert await broker.call("HGET", key, "state") == b"ended"
    damaged = await stage.jobs.get("bad")
    assert damaged is None or damaged.finish == inference_pb2.ERROR


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
    record = await stage.record("far")
    assert record.remaining_ms is not None
    assert record.remaining_ms > 10**12 - 5000


async def test_unknown_jobs(stage: Stage) -> None:
    assert await stage.jobs.get("nobody") is None
    assert await stage.log("nobody") == []
    assert await stage.jobs.cancel("nobody") is Finished.UNKNOWN
    assert await stage.jobs.commit("w0", "i", []) == Committed([], None)
    assert await stage.jobs.claim("w0", "i", []) == []
