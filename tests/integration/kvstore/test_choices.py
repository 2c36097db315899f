"""Jobs with several choices: each has its own indexes and its own end, the job has one end."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import CommitGap
from kvstore.jobs import Commit, Finished, JobState, Rehomed
from octavo.v1 import job_pb2
from octavo.v1.inference_pb2 import CANCELLED, ERROR, LENGTH, STOP

from .conftest import Ear, Stage, chunk, on_both_servers

if TYPE_CHECKING:
    from kvstore.client import Broker

pytestmark = on_both_servers

WRITTEN, DUPLICATE, FENCED = Commit.WRITTEN, Commit.DUPLICATE, Commit.FENCED


async def test_the_job_ends_with_its_last_choice(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker, n=3)
    assert await stage.load(worker) == (1, 3 + 3 * 7)
    record = await stage.record("r1")
    assert (record.next, record.ends) == ({0: 0, 1: 0, 2: 0}, {})
    steps = [
        [chunk("r1", 0, [5], choice=0), chunk("r1", 0, [6], choice=1), chunk("r1", 0, [7], choice=2)],
        [chunk("r1", 1, [8], choice=2, finish=LENGTH), chunk("r1", 1, [9, 9], choice=0)],
        [chunk("r1", 1, [], choice=1, finish=STOP)],
        [chunk("r1", 3, [4], choice=0, finish=STOP)],
    ]
    async with Ear(broker, stage.gateway) as ear:
        for step in steps[:3]:
            assert await stage.commit(worker, *step) == [WRITTEN] * len(step)
            assert await ear.deliveries() == step
        record = await stage.record("r1")
        assert (record.state, record.finish) == (JobState.RUNNING, None)
        assert (record.next, record.ends) == ({0: 3, 1: 1, 2: 2}, {1: STOP, 2: LENGTH})
        assert await broker.call("XLEN", broker.keys.jobs("w0")) == 1
        assert await broker.call("PTTL", broker.keys.log("r1")) == -1
        assert await stage.commit(worker, *steps[3]) == [WRITTEN]
        assert await ear.deliveries() == steps[3]
    record = await stage.record("r1")
    assert (record.state, record.finish) == (JobState.ENDED, STOP)
    assert (record.next, record.ends) == ({0: 4, 1: 1, 2: 2}, {0: STOP, 1: STOP, 2: LENGTH})
    assert await stage.log("r1") == [each for step in steps for each in step]
    assert await stage.load(worker) == (0, 0)
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 0
    assert await broker.call("PTTL", broker.keys.log("r1")) > 0


async def test_an_error_that_ends_all_is_the_jobs_finish(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker, n=3)
    await stage.commit(worker, chunk("r1", 0, [1], choice=1, finish=STOP))
    failed = [chunk("r1", 0, [], choice=choice, finish=ERROR) for choice in (0, 2)]
    assert await stage.commit(worker, *failed) == [WRITTEN] * 2
    record = await stage.record("r1")
    assert (record.state, record.finish, record.ends) == (JobState.ENDED, ERROR, {0: ERROR, 1: STOP, 2: ERROR})


async def test_gaps_and_repeats_are_those_of_a_choice(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker, n=3)
    first = [chunk("r1", 0, [1, 2], choice=0), chunk("r1", 0, [1], choice=1), chunk("r1", 0, [1], choice=2)]
    assert await stage.commit(worker, *first) == [WRITTEN] * 3
    assert await stage.commit(worker, *first) == [DUPLICATE] * 3
    step = [chunk("r1", 3, [3], choice=0), chunk("r1", 2, [3], choice=1), chunk("r1", 1, [3], choice=2)]
    with pytest.raises(CommitGap) as caught:
        await stage.commit(worker, *step)
    assert caught.value.expected == {"r1": {0: 2, 1: 1}}
    assert (await stage.record("r1")).next == {0: 2, 1: 1, 2: 2}
    assert await stage.log("r1") == [*first, step[2]]


async def test_a_choice_that_has_ended_says_no_more_and_holds_up_nobody(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker, n=2)
    end = chunk("r1", 0, [1], choice=0, finish=STOP)
    bare = chunk("r1", 0, [], choice=1, finish=LENGTH)
    assert await stage.commit(worker, end) == [WRITTEN]
    assert await stage.commit(worker, end) == [DUPLICATE]
    with pytest.raises(CommitGap) as caught:
        await stage.commit(worker, chunk("r1", 1, [2], choice=0))
    assert caught.value.expected == {"r1": {0: 1}}
    assert await stage.commit(worker, bare, bare) == [WRITTEN, DUPLICATE]
    # The job has ended now, and with it nothing has changed about repeats.
    assert await stage.commit(worker, end, bare) == [DUPLICATE] * 2
    assert await stage.log("r1") == [end, bare]
    assert await stage.load(worker) == (0, 0)


async def test_a_choice_that_the_job_does_not_have_ends_nothing(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker, n=2)
    for choice in (2, 31, 2**32 - 1):
        with pytest.raises(CommitGap) as caught:
            await stage.commit(worker, chunk("r1", 0, [1], choice=choice, finish=STOP))
        assert caught.value.expected == {"r1": {choice: 0}}
    assert await stage.log("r1") == []
    assert (await stage.record("r1")).state is JobState.RUNNING


@pytest.mark.parametrize("how", ["cancel", "deadline", "orphans"])
async def test_one_delivery_from_outside_ends_all_that_are_open(stage: Stage, broker: Broker, how: str) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker, n=4)
    done = chunk("r1", 0, [1], choice=2, finish=STOP)
    begun = chunk("r1", 0, [1, 2], choice=0)
    await stage.commit(worker, done, begun)
    async with Ear(broker, stage.gateway) as ear:
        if how == "cancel":
            assert await stage.jobs.cancel("r1") is Finished.ENDED
        elif how == "deadline":
            late = partial(stage.jobs.finish, finish=ERROR, failure=job_pb2.FAILURE_DEADLINE, error="late")
            assert await late("r1", expect_attempt=1) is Finished.ENDED
        else:
            await stage.registry.leave(worker.id, worker.incarnation)
            await broker.call("HSET", broker.keys.orphaned(worker.id), f"{worker.incarnation} left", 1)
            assert await stage.rehome(None) == {"r1": Rehomed.ENDED}
        (last,) = await ear.deliveries()
        assert ear.silent()
    finish = CANCELLED if how == "cancel" else ERROR
    assert (last.chunk.choice, last.chunk.start, last.chunk.finish) == (0, 0, finish)
    assert not last.HasField("usage")
    assert await stage.log("r1") == [done, begun, last]
    record = await stage.record("r1")
    assert (record.state, record.finish) == (JobState.ENDED, finish)
    assert (record.next, record.ends) == ({0: 2, 1: 0, 2: 1, 3: 0}, {2: STOP})
    assert await stage.load(worker) == (0, 0)
    # The worker is told for each choice; of the one that it had ended itself, that it is written.
    late_step = [chunk("r1", 2, [3], choice=0), chunk("r1", 0, [1], choice=1, finish=STOP), done]
    assert await stage.commit(worker, *late_step) == [FENCED, FENCED, DUPLICATE]
