"""Jobs whose hash somebody changes while they run: each ends as damaged, and no other one is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import CommitGap
from kvstore.jobs import Commit, JobState
from octavo.v1 import inference_pb2, job_pb2

from .conftest import Ear, Stage, chunk, on_both_servers

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo

pytestmark = on_both_servers

STOP = inference_pb2.STOP
JUNK = (b"junk", b"", b"1.5", b"-5", b"007", b"inf", b"nan", b"1e999", b"0x10", b"4294967296", b"9" * 30, b"9" * 5000)


async def three(stage: Stage, *, n: int = 1) -> WorkerInfo:
    """A worker that runs "first", "bad" and "last", of each choice of which it has told two tokens."""
    worker = await stage.worker()
    for request_id in ("first", "bad", "last"):
        await stage.submit(request_id, worker, n=n)
    assert len(await stage.claim(worker)) == 3
    for request_id in ("first", "bad", "last"):
        step = [chunk(request_id, 0, [1, 2], choice=choice) for choice in range(n)]
        assert await stage.commit(worker, *step) == [Commit.WRITTEN] * n
    return worker


async def is_damaged(stage: Stage, broker: Broker, reason: str) -> None:
    """The bad job has ended, once and for that reason, and nothing is charged for it or waits in a stream."""
    assert await broker.call("HGET", broker.keys.job("bad"), "state") == b"ended"
    *_, last = await stage.log("bad")
    assert (last.chunk.finish, last.failure) == (inference_pb2.ERROR, job_pb2.FAILURE_INTERNAL)
    assert last.chunk.error == f"the job in the broker is damaged: {reason}"
    assert sum(delivery.chunk.finish != 0 for delivery in await stage.log("bad")) == 1
    assert broker.malformed == 1
    (queue,) = await stage.jobs.queues()
    assert (queue.undelivered, queue.pending) == (0, 2)


@pytest.mark.parametrize("value", JUNK, ids=lambda value: str(value[:10]))
async def test_a_next_index_that_is_none(stage: Stage, broker: Broker, value: bytes) -> None:
    worker = await three(stage)
    await broker.call("HSET", broker.keys.job("bad"), "next:0", value)
    step = [chunk(request_id, 2, [3]) for request_id in ("first", "bad", "last")]
    assert await stage.commit(worker, *step) == [Commit.WRITTEN, Commit.FENCED, Commit.WRITTEN]
    await is_damaged(stage, broker, f"its field next:0 is {value!r:.40}")
    assert await stage.load(worker) == (2, 20)
    # What else is said of it is refused, and the same step told again changes nothing.
    assert await stage.commit(worker, *step) == [Commit.DUPLICATE, Commit.FENCED, Commit.DUPLICATE]
    assert await stage.commit(worker, chunk("bad", 3, [], finish=STOP)) == [Commit.FENCED]
    await is_damaged(stage, broker, f"its field next:0 is {value!r:.40}")


async def test_beside_a_gap_in_another_job(stage: Stage, broker: Broker) -> None:
    worker = await three(stage)
    await broker.call("HSET", broker.keys.job("bad"), "next:0", "junk")
    with pytest.raises(CommitGap) as caught:
        await stage.commit(worker, chunk("first", 5, [3]), chunk("bad", 2, [3]), chunk("last", 2, [3]))
    assert caught.value.expected == {"first": {0: 2}}
    await is_damaged(stage, broker, "its field next:0 is b'junk'")


async def test_only_the_attempt_that_found_the_damage_is_ended(stage: Stage, broker: Broker) -> None:
    """A step that was held up on its way says nothing of the attempt that goes on elsewhere."""
    worker = await three(stage)
    await broker.call("HSET", broker.keys.job("bad"), "next:0", "junk", "attempt", "2")
    assert await stage.commit(worker, chunk("bad", 2, [3])) == [Commit.FENCED]
    assert await broker.call("HGET", broker.keys.job("bad"), "state") == b"running"
    await broker.call("HSET", broker.keys.job("bad"), "next:0", "2")


@pytest.mark.parametrize("value", [b"junk", b"", b"1.5", b"-1", b"9" * 30, None])
@pytest.mark.parametrize("n", [1, 3])
async def test_how_many_choices_are_open_is_seen_from_their_ends(
    stage: Stage, broker: Broker, value: bytes | None, n: int
) -> None:
    worker = await three(stage, n=n)
    key = broker.keys.job("bad")
    for choice in range(n):
        await (broker.call("HDEL", key, "open") if value is None else broker.call("HSET", key, "open", value))
        assert (await stage.record("bad")).state is JobState.RUNNING
        assert await stage.commit(worker, chunk("bad", 2, [3], choice=choice, finish=STOP)) == [Commit.WRITTEN]
        assert await broker.call("HGET", key, "open") == str(n - 1 - choice).encode()
    record = await stage.record("bad")
    assert (record.state, record.finish, record.ends) == (JobState.ENDED, STOP, dict.fromkeys(range(n), STOP))
    assert (await stage.load(worker))[0] == 2
    assert [delivery.chunk.error for delivery in await stage.log("bad")] == [""] * 2 * n


@pytest.mark.parametrize(("field", "value"), [("open", "0"), ("open", "3"), ("choices", "5"), ("choices", "1")])
async def test_numbers_of_choices_that_disagree(stage: Stage, broker: Broker, field: str, value: str) -> None:
    """One is wrong, and nobody can tell which: were either believed, the job would end too soon, or never."""
    worker = await three(stage, n=2)
    await broker.call("HSET", broker.keys.job("bad"), field, value)
    step = [chunk(request_id, 2, [3], finish=STOP) for request_id in ("first", "bad", "last")]
    assert await stage.commit(worker, *step) == [Commit.WRITTEN, Commit.FENCED, Commit.WRITTEN]
    said = value if field == "open" else "2"
    await is_damaged(stage, broker, f"its field open is {said.encode()!r}")


async def test_a_number_of_choices_that_is_none(stage: Stage, broker: Broker) -> None:
    worker = await three(stage, n=2)
    await broker.call("HSET", broker.keys.job("bad"), "choices", "junk")
    step = [chunk(request_id, 2, [3], choice=1) for request_id in ("first", "bad", "last")]
    assert await stage.commit(worker, *step) == [Commit.WRITTEN, Commit.FENCED, Commit.WRITTEN]
    await is_damaged(stage, broker, "its field choices is b'junk'")


async def test_a_job_without_its_gateway_keeps_nothing_from_the_others(stage: Stage, broker: Broker) -> None:
    worker = await three(stage)
    await broker.call("HDEL", broker.keys.job("bad"), "gateway")
    step = [chunk(request_id, 2, [3]) for request_id in ("first", "bad", "last")]
    async with Ear(broker, stage.gateway) as ear:
        assert await stage.commit(worker, *step) == [Commit.WRITTEN] * 3
        assert await ear.deliveries() == [step[0], step[2]]
        assert ear.silent()
    assert (await stage.log("bad"))[-1] == step[1]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("next:0", "-5", "b'-5' is not 0 to 4294967295"),
        ("next:0", "9" * 30, f"b'{'9' * 30}' is not 0 to 4294967295"),
        ("attempt", "9" * 30, f"b'{'9' * 30}' is not 0 to 2147483648"),
        ("prompt_tokens", "junk", "b'junk' is not 0 to 4294967295"),
        ("state", "asleep", "'asleep' is not a valid JobState"),
    ],
)
async def test_whoever_reads_a_damaged_job_ends_it(
    stage: Stage, broker: Broker, field: str, value: str, reason: str
) -> None:
    """Its worker drops what nobody can read any more: without that it would stay in the stream for ever."""
    worker = await three(stage)
    await broker.call("HSET", broker.keys.job("bad"), field, value)
    first, bad = await stage.jobs.several(["first", "bad"])
    assert first is not None
    assert bad is None
    await is_damaged(stage, broker, reason)
    assert await stage.load(worker) == (2, 20)
    assert await stage.jobs.get("bad") is None or field == "state"
    assert len(await stage.log("bad")) == 2


@pytest.mark.parametrize("value", [b"junk", b"", b"0", b"-1", b"256", b"9" * 30])
@pytest.mark.parametrize("choice", [0, 1])
async def test_an_end_that_is_none(stage: Stage, broker: Broker, value: bytes, choice: int) -> None:
    worker = await three(stage, n=2)
    await broker.call("HSET", broker.keys.job("bad"), f"end:{choice}", value)
    step = [chunk(request_id, 2, [3], choice=choice) for request_id in ("first", "bad", "last")]
    assert await stage.commit(worker, *step) == [Commit.WRITTEN, Commit.FENCED, Commit.WRITTEN]
    await is_damaged(stage, broker, f"its field end:{choice} is {value!r:.40}")


async def test_a_job_that_goes_on_though_all_its_choices_have_ended(stage: Stage, broker: Broker) -> None:
    """Nothing more comes of it: its worker takes its last chunk for one that was written."""
    worker = await three(stage)
    await broker.call("HSET", broker.keys.job("bad"), "end:0", int(STOP))
    assert await stage.commit(worker, chunk("bad", 2, [], finish=inference_pb2.ERROR)) == [Commit.DUPLICATE]
    assert await stage.jobs.get("bad") is None
    await is_damaged(stage, broker, "all of its 1 choices have ended, and it has not")
