"""Moving a job to another worker: what moves along, who is refused, and when a job is given up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import BrokerWrongType
from kvstore.jobs import Commit, Finished, Jobs, JobState, Rehomed, Target
from kvstore.registry import Load
from octavo.v1 import inference_pb2, job_pb2

from ..conftest import names
from .conftest import SHORT_TTL_MS, Ear, Stage, chunk, on_both_servers, settled, until

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.orphans import Orphan

pytestmark = on_both_servers

MOVED, STALE, WAITING, ENDED = (
    Rehomed.MOVED,
    Rehomed.STALE,
    Rehomed.WAITING,
    Rehomed.ENDED,
)
STOP = inference_pb2.STOP


@pytest.fixture(autouse=True)
async def _settled(broker: Broker) -> None:
    await settled(broker)


async def found(stage: Stage, request_id: str) -> Orphan:
    (orphan,) = [each for each in await stage.jobs.orphans() if each.request_id == request_id]
    return orphan


async def test_what_is_charged_and_expected_moves_along(mortal: Stage) -> None:
    worker, other = await mortal.worker(), await mortal.worker("w1")
    for request_id in ("begun", "fresh", "stays"):
        await mortal.submit(request_id, worker, n=2, prompt=range(20), prefill=20)
    await mortal.claim(worker)
    await mortal.commit(worker, chunk("begun", 0, [1, 2], choice=1), chunk("begun", 0, [3], choice=0))
    await mortal.perish(worker)
    target = Target("w1", other.incarnation, prefill=7, predicted=16)
    for request_id in ("begun", "fresh"):
        assert await mortal.jobs.rehome(await found(mortal, request_id), target) is MOVED
    loads = await mortal.registry.loads([worker, other])
    assert (loads["w0"], loads["w1"]) == (Load(1, 34, 20, 2), Load(2, 68, 14, 4))
    record = await mortal.record("begun")
    assert (record.state, record.attempt, record.owner) == (JobState.QUEUED, 1, "")
    assert (record.worker, record.worker_incarnation, record.predicted) == ("w1", other.incarnation, 16)
    # A token or two do not prove that it was not what the worker died of.
    assert (record.next, record.deaths) == ({0: 1, 1: 2}, 1)

    # It is refunded as at any worker: the prompt with the first delivery, though it is not the answer's first.
    (begun, fresh) = await mortal.claim(other)
    assert (begun.attempt, begun.next, begun.ended) == (2, (1, 2), frozenset())
    assert (fresh.attempt, fresh.next) == (2, (0, 0))
    assert (await mortal.registry.loads([other]))["w1"] == Load(2, 68, 14, 4)
    assert await mortal.commit(other, chunk("begun", 1, [4], choice=0, attempt=2)) == [Commit.WRITTEN]
    assert (await mortal.registry.loads([other]))["w1"] == Load(2, 68, 7, 4)
    step = [chunk("begun", 2, [], choice=each, attempt=2, finish=STOP) for each in (0, 1)]
    assert await mortal.commit(other, *step) == [Commit.WRITTEN] * 2
    assert (await mortal.registry.loads([other]))["w1"] == Load(1, 34, 7, 2)
    starts = [(each.attempt, each.chunk.choice, each.chunk.start) for each in await mortal.log("begun")]
    assert starts == [(1, 1, 0), (1, 0, 0), (2, 0, 1), (2, 0, 2), (2, 1, 2)]


async def test_a_claim_tells_which_choices_have_ended(mortal: Stage) -> None:
    worker, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.running("r1", worker, n=4)
    first = chunk("r1", 0, [1, 2], choice=0)
    first.route.cached_tokens = 2
    done, bare = chunk("r1", 0, [1], choice=2, finish=STOP), chunk("r1", 0, [], choice=3, finish=inference_pb2.LENGTH)
    await mortal.commit(worker, first, done, bare)
    await mortal.perish(worker)
    orphan = await found(mortal, "r1")
    assert (orphan.next, orphan.ended) == ((2, 0, 1, 0), frozenset({2, 3}))
    assert await mortal.rehome(other) == {"r1": MOVED}
    entries = await mortal.entries(other)
    (claim,) = await mortal.jobs.claim(other.id, other.incarnation, entries)
    assert (claim.next, claim.ended, claim.cached_tokens) == ((2, 0, 1, 0), frozenset({2, 3}), 2)
    # Claimed again after more has come.
    await mortal.commit(other, chunk("r1", 0, [5], choice=1, attempt=2, finish=STOP))
    (again,) = await mortal.jobs.claim(other.id, other.incarnation, entries)
    assert (again.attempt, again.next, again.ended) == (2, (2, 1, 1, 0), frozenset({1, 2, 3}))


async def test_a_worker_that_was_only_frozen_is_refused(mortal: Stage, broker: Broker) -> None:
    """It wakes before and after the other one has claimed the job; it claims again what it had read; it hears of it."""
    frozen, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.submit("r1", frozen)
    entries = await mortal.entries(frozen)
    await mortal.jobs.claim(frozen.id, frozen.incarnation, entries)
    await mortal.commit(frozen, chunk("r1", 0, [1]))
    await mortal.perish(frozen)
    async with Ear(broker, frozen.incarnation) as ear:
        assert await mortal.rehome(other) == {"r1": MOVED}
        assert await ear.next() == b"r1"
    late = [chunk("r1", 1, [2]), chunk("r1", 1, [], finish=STOP)]
    end = partial(mortal.jobs.finish, "r1", finish=inference_pb2.ERROR, failure=job_pb2.FAILURE_UNAVAILABLE, error="")
    assert await end(expect_attempt=1) is Finished.FENCED
    assert await mortal.commit(frozen, *late) == [Commit.FENCED] * 2
    assert (await mortal.registry.renew(frozen)).held_lease
    assert await mortal.jobs.claim(frozen.id, frozen.incarnation, entries) == []
    assert await mortal.jobs.next_entries(mortal.reader, frozen.id, frozen.incarnation, 10, 1) == []
    (claim,) = await mortal.claim(other)
    assert await mortal.commit(frozen, *late) == [Commit.FENCED] * 2
    # Nor may it say that it is the new attempt.
    assert await mortal.commit(frozen, chunk("r1", 1, [2], attempt=2)) == [Commit.FENCED]
    assert await mortal.commit(other, chunk("r1", 1, [2], attempt=claim.attempt)) == [Commit.WRITTEN]
    assert [each.attempt for each in await mortal.log("r1")] == [1, 2]
    assert (await mortal.load(frozen), await mortal.load(other)) == ((0, 0), (1, 10))


async def everything(broker: Broker) -> dict[str, Any]:
    """All that is kept, but how long leases still last."""
    dump = await names(broker)
    return dict(zip(dump, await broker.pipeline([("DUMP", name) for name in dump]), strict=True))


@pytest.mark.parametrize("how", ["lapsed", "replaced", "draining", "lease of another type", "stream of another type"])
async def test_a_target_that_is_gone_changes_nothing(mortal: Stage, broker: Broker, how: str) -> None:
    worker, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.running("r1", worker)
    await mortal.perish(worker)
    orphan = await found(mortal, "r1")
    target, lease = Target("w1", other.incarnation, 3, 0), broker.keys.worker("w1")
    if how == "lapsed":
        await broker.call("DEL", lease)
    elif how == "replaced":
        await mortal.perish(other)
        await mortal.worker("w1")
    elif how == "draining":
        await broker.call("HSET", lease, "state", "draining")
    elif how == "lease of another type":
        await broker.call("SET", lease, "x", "PX", 60_000)
    else:
        await broker.call("SET", broker.keys.jobs("w1"), "x")
    before = await everything(broker)
    if how == "stream of another type":
        with pytest.raises(BrokerWrongType) as caught:
            await mortal.jobs.rehome(orphan, target)
        assert caught.value.keys == (broker.keys.jobs("w1"),)
    else:
        assert await mortal.jobs.rehome(orphan, target) is STALE
    assert await everything(broker) == before
    await broker.call("DEL", broker.keys.jobs("w1"))


@pytest.mark.parametrize("how", ["ended", "moved", "moved back", "claimed by another life", "submitted anew", "gone"])
async def test_a_job_that_is_not_as_it_was_found_is_left_alone(mortal: Stage, broker: Broker, how: str) -> None:
    worker, other = await mortal.worker(), await mortal.worker("w1")
    await mortal.running("r1", worker)
    await mortal.perish(worker)
    orphan = await found(mortal, "r1")
    if how == "ended":
        assert await mortal.jobs.cancel("r1") is Finished.ENDED
    elif how == "moved":
        assert await mortal.rehome(other) == {"r1": MOVED}
    elif how == "gone":
        await broker.call("DEL", broker.keys.job("r1"))
    else:
        now = await mortal.worker()
        if how == "submitted anew":
            await broker.call("DEL", broker.keys.job("r1"))
            await mortal.submit("r1", now)
        else:
            assert await mortal.rehome(now) == {"r1": MOVED}
        if how == "claimed by another life":
            assert [claim.attempt for claim in await mortal.claim(now)] == [2]
            await mortal.perish(now)
    before = await everything(broker)
    assert await mortal.jobs.rehome(orphan, Target("w1", other.incarnation, 3, 0)) is STALE
    assert await everything(broker) == before
    # What tests do by hand, others clear up by hand.
    await mortal.jobs.orphans()
    await broker.call("DEL", broker.keys.load("w0", worker.incarnation))


async def test_without_a_target_it_waits_and_then_ends(mortal: Stage, broker: Broker) -> None:
    worker = await mortal.worker()
    await mortal.running("r1", worker)
    await mortal.commit(worker, chunk("r1", 0, [1]))
    await mortal.perish(worker)
    for _ in range(3):
        assert await mortal.rehome(None) == {"r1": WAITING}
    assert (await mortal.record("r1")).state is JobState.RUNNING
    assert (await mortal.jobs.ledger()).in_flight == 1

    hasty = Jobs(broker, lease_ttl_ms=SHORT_TTL_MS, orphan_wait_s=0.05)

    async def over() -> Orphan | None:
        (orphan,) = await hasty.orphans()
        return orphan if orphan.waited_ms > 50 else None

    orphan = await until(over)
    assert orphan is not None
    assert await hasty.rehome(orphan, None) is ENDED
    (_, delivery) = await mortal.log("r1")
    assert delivery.failure == job_pb2.FAILURE_UNAVAILABLE
    assert delivery.chunk.error == "worker w0 died, and for 0.05 s there was no other to run it"
    assert await hasty.rehome(orphan, None) is STALE
    assert await mortal.jobs.orphans() == []
    assert await broker.call("EXISTS", broker.keys.jobs("w0")) == 0
    assert (await mortal.jobs.ledger()).failed == 1
