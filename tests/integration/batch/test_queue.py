"""What rq does with batches, and what is seen to that it does not."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from kvstore import batch_queue
from kvstore.batch_queue import enqueue, queue_of, settle
from kvstore.batch_turns import arrange, note, others_wait
from kvstore.batches import BatchState, Progress, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.batches import BatchStore

ID = "batch_" + "0" * 24


@pytest.fixture
def opened(store: BatchStore) -> Iterator[BatchStore]:
    """With a batch that nobody runs."""
    store.create(ID, Settings(name="f", total=3, metadata={"a": "b"}))
    yield store
    store.end(ID, BatchState.CANCELLED)
    queue_of(store).empty()
    batch_queue.drop(store, ID)
    store.close()


def job(store: BatchStore) -> Job:
    return Job.fetch(ID, connection=store.redis, serializer=JSONSerializer)


def test_what_is_known_of_a_batch(opened: BatchStore) -> None:
    batch = opened.get(ID)
    assert batch is not None
    assert (batch.state, batch.settings) == (BatchState.QUEUED, Settings(name="f", total=3, metadata={"a": "b"}))
    assert batch.created_ms > 0
    assert opened.start(ID) is BatchState.RUNNING
    assert opened.note(ID, Progress(done=1, lines_per_s=0.5)) is BatchState.RUNNING
    assert opened.all() == [opened.get(ID)]
    found = opened.get(ID)
    assert found is not None
    assert (found.progress.done, found.eta_s) == (1, 4.0)
    assert opened.end(ID, BatchState.COMPLETED) is BatchState.COMPLETED
    assert opened.open_ids() == []
    assert opened.note(ID, Progress(done=2)) is BatchState.COMPLETED
    assert opened.start(ID) is BatchState.COMPLETED
    assert opened.cancel(ID) is BatchState.COMPLETED
    assert 0 < opened.redis.ttl(opened.keys.batch(ID)) <= 30 * 86_400
    assert opened.reopen(ID) is BatchState.COMPLETED


def test_a_batch_waits_while_no_worker_runs_it(opened: BatchStore) -> None:
    queue = queue_of(opened)

    def waits() -> bool:
        assert not others_wait(opened, queue, "")  # they are one tenant's
        return others_wait(opened, queue, "acme")

    assert waits()  # it has no job yet
    enqueue(opened, ID)
    assert waits()
    opened.start(ID)
    queue.empty()
    name = queue.started_job_registry.key
    opened.redis.zadd(name, {f"{ID}:run": time.time() + 5})
    assert not waits()
    opened.redis.zadd(name, {f"{ID}:run": time.time() - 5})
    assert waits()  # its worker has died
    opened.redis.delete(name)
    opened.end(ID, BatchState.CANCELLED)
    assert not waits()


def test_the_job_whose_turn_it_is_goes_first(opened: BatchStore) -> None:
    queue, ids = queue_of(opened), [f"batch_{number:024x}" for number in (1, 2, 3)]
    for batch_id, tenant in zip(ids, ("acme", "acme", "other"), strict=True):
        opened.create(batch_id, Settings(tenant=tenant))
        enqueue(opened, batch_id)
    arrange(opened, queue)
    assert queue.get_job_ids() == ids
    note(opened, "acme")
    arrange(opened, queue)
    assert queue.get_job_ids() == [ids[2], *ids[:2]]
    note(opened, "other")
    arrange(opened, queue)
    assert queue.get_job_ids() == [ids[0], ids[2], ids[1]]
    assert 0 < opened.redis.ttl(opened.keys.batch_turns) <= 86_400
    for batch_id in ids:
        opened.end(batch_id, BatchState.CANCELLED)
        batch_queue.drop(opened, batch_id)


def test_a_batch_is_cancelled_by_whoever_runs_it(opened: BatchStore) -> None:
    opened.start(ID)
    assert opened.cancel(ID) is BatchState.CANCELLING
    assert opened.start(ID) is BatchState.CANCELLING
    assert opened.end(ID, BatchState.CANCELLED) is BatchState.CANCELLED
    assert opened.reopen(ID) is BatchState.QUEUED
    assert opened.open_ids() == [ID]
    assert opened.redis.ttl(opened.keys.batch(ID)) == -1
    batch = opened.get(ID)
    assert batch is not None
    assert batch.ended_ms == 0


def test_batches_that_are_unknown(store: BatchStore) -> None:
    assert store.get(ID) is store.start(ID) is store.cancel(ID) is store.note(ID, Progress()) is None
    store.redis.zadd(store.keys.batches, {ID: 1})
    store.redis.sadd(store.keys.open_batches, ID)
    assert store.all() == []
    assert store.open_ids() == []


def test_a_batch_has_one_job(opened: BatchStore) -> None:
    enqueue(opened, ID)
    enqueue(opened, ID)
    assert queue_of(opened).job_ids == [ID]
    found = job(opened)
    assert (found.timeout, found.retries_left, found.origin) == (-1, 5, opened.keys.batch_queue)


def test_a_job_that_rq_has_lost_is_made_anew(opened: BatchStore) -> None:
    settle(opened)
    assert queue_of(opened).job_ids == [ID]
    settle(opened)
    assert queue_of(opened).job_ids == [ID]
    found = job(opened)
    found.set_status(JobStatus.FINISHED)
    queue_of(opened).remove(found)
    settle(opened)
    assert queue_of(opened).job_ids == [ID]
    assert job(opened).get_status() == JobStatus.QUEUED


def test_batches_without_a_job_get_theirs_in_their_order(opened: BatchStore) -> None:
    """As those that came by HTTP: gateways have nothing to do with rq."""
    later = "batch_" + "a" * 24, "batch_" + "1" * 24
    for batch_id in later:
        opened.create(batch_id, Settings())
    for number, batch_id in enumerate(later):
        opened.redis.hset(opened.keys.batch(batch_id), "created_ms", 2**42 + number)
    settle(opened)
    assert queue_of(opened).job_ids == [ID, *later]
    for batch_id in later:
        opened.end(batch_id, BatchState.CANCELLED)
        batch_queue.drop(opened, batch_id)


def test_a_job_that_rq_gave_up_ends_its_batch(opened: BatchStore) -> None:
    enqueue(opened, ID)
    job(opened).set_status(JobStatus.FAILED)
    settle(opened)
    batch = opened.get(ID)
    assert batch is not None
    assert batch.state is BatchState.FAILED
    assert batch.error.startswith("given up after 5 tries without a line done")


def test_an_open_id_without_a_batch_is_forgotten(store: BatchStore) -> None:
    store.redis.zadd(store.keys.batches, {ID: 1})
    store.redis.sadd(store.keys.open_batches, ID)
    settle(store)
    assert store.open_ids() == []
    with pytest.raises(NoSuchJobError):
        job(store)


async def test_the_intermediate_queue_is_looked_through_within_seconds(opened: BatchStore) -> None:
    """A worker that died between taking a job and beginning it."""
    from kvstore.batch_worker import BatchWorker

    await asyncio.to_thread(enqueue, opened, ID)
    queue = queue_of(opened)
    opened.redis.lmove(queue.key, queue.intermediate_queue_key)
    worker = BatchWorker(opened, "w")
    worker.run_maintenance_tasks()
    assert queue.job_ids == []
    opened.redis.set(queue.intermediate_queue.get_first_seen_key(ID), 0)
    worker.run_maintenance_tasks()
    assert queue.job_ids == [ID]
    assert job(opened).retries_left == 4
