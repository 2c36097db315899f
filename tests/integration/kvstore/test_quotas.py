"""What a tenant may ask for: decided with the submission, and given back with the job's end, whoever ends it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import OverQuota, QueueFull
from kvstore.jobs import Finished, Jobs, Rehomed, Submitted
from kvstore.tenants import Quota
from octavo.v1 import inference_pb2, job_pb2

from .conftest import SHORT_TTL_MS, Stage, chunk, on_both_servers, settled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.registry import WorkerInfo

STOP = inference_pb2.STOP
MINUTE_MS = 60_000
CHARGE = 10
"""Of each job here: a prompt of 3 tokens and at most 7 new ones."""


async def refused(stage: Stage, name: str, worker: WorkerInfo, quota: Quota) -> OverQuota:
    with pytest.raises(OverQuota) as caught:
        await stage.submit(name, worker, quota=quota)
    return caught.value


async def passes(stage: Stage, milliseconds: int, tenant: str = "acme") -> None:
    """As if that time had passed since the tenant asked last."""
    await stage.broker.call("HINCRBY", stage.broker.keys.quota(tenant), "at_ms", -milliseconds)


async def tokens(stage: Stage, tenant: str = "acme") -> float:
    """As many are charged, as of the last submission."""
    return float(await stage.broker.call("HGET", stage.broker.keys.quota(tenant), "tokens") or 0)


async def living(stage: Stage, tenant: str = "acme") -> set[bytes]:
    """Its live jobs."""
    return {*await stage.broker.call("SMEMBERS", stage.broker.keys.live(tenant))}


@on_both_servers
async def test_so_many_jobs_may_live(stage: Stage) -> None:
    worker, quota = await stage.worker(), Quota(concurrency=2)
    await stage.submit("acme/a", worker, quota=quota)
    await stage.submit("acme/b", worker, quota=quota)
    error = await refused(stage, "acme/c", worker, quota)
    assert str(error) == "with this request it would be 3 unfinished requests, and 2 are allowed"
    assert error.retry_after_ms == 0
    await stage.submit("other/c", worker, quota=quota)
    await stage.submit("c", worker)
    assert await living(stage) == {b"acme/a", b"acme/b"}
    await stage.jobs.cancel("acme/a")
    await stage.submit("acme/c", worker, quota=quota)
    assert await living(stage) == {b"acme/b", b"acme/c"}


async def by_the_worker(stage: Stage, worker: WorkerInfo) -> None:
    await stage.claim(worker)
    await stage.commit(worker, chunk("acme/a", 0, [5, 6], finish=STOP))


async def by_a_cancel(stage: Stage, _worker: WorkerInfo) -> None:
    assert await stage.jobs.cancel("acme/a") is Finished.ENDED


async def by_its_deadline(stage: Stage, _worker: WorkerInfo) -> None:
    failure = job_pb2.FAILURE_DEADLINE
    await stage.jobs.finish("acme/a", finish=inference_pb2.ERROR, failure=failure, error="late")


async def by_nobody_being_there(stage: Stage, worker: WorkerInfo) -> None:
    await settled(stage.broker)
    await stage.perish(worker)
    jobs = Jobs(stage.broker, lease_ttl_ms=SHORT_TTL_MS, orphan_wait_s=-1)
    (orphan,) = await jobs.orphans()
    assert await jobs.rehome(orphan, None) is Rehomed.ENDED


async def by_killing_workers(stage: Stage, worker: WorkerInfo) -> None:
    await stage.claim(worker)
    await stage.broker.call("HSET", stage.broker.keys.job("acme/a"), "deaths", 2, "fruitless", 2)
    await settled(stage.broker)
    await stage.perish(worker)
    assert await stage.rehome(None) == {"acme/a": Rehomed.DEAD}


async def by_being_damaged(stage: Stage, worker: WorkerInfo) -> None:
    await stage.broker.call("HSET", stage.broker.keys.job("acme/a"), "payload", "junk")
    assert await stage.claim(worker) == []


@pytest.mark.parametrize(
    ("end", "used"),
    [
        (by_the_worker, 5),
        (by_a_cancel, 0),
        (by_its_deadline, 0),
        (by_nobody_being_there, 0),
        (by_killing_workers, 3),
        (by_being_damaged, 3),
    ],
)
async def test_every_end_gives_back_what_was_not_used(
    mortal: Stage, end: Callable[[Stage, WorkerInfo], Awaitable[None]], used: int
) -> None:
    worker = await mortal.worker()
    await mortal.submit("acme/a", worker, quota=Quota(tokens_per_minute=CHARGE, concurrency=1))
    assert (await tokens(mortal), await living(mortal)) == (CHARGE, {b"acme/a"})
    await end(mortal, worker)
    assert (await tokens(mortal), await living(mortal)) == (used, set())


async def test_a_job_that_moves_stays_on_its_tenants_account(mortal: Stage) -> None:
    worker, quota = await mortal.worker("w0"), Quota(tokens_per_minute=CHARGE, concurrency=1)
    await mortal.submit("acme/a", worker, quota=quota)
    await mortal.claim(worker)
    await mortal.commit(worker, chunk("acme/a", 0, [5]))
    heir = await mortal.worker("w1")
    await settled(mortal.broker)
    await mortal.perish(worker)
    assert await mortal.rehome(heir) == {"acme/a": Rehomed.MOVED}
    assert (await tokens(mortal), await living(mortal)) == (CHARGE, {b"acme/a"})
    await mortal.claim(heir)
    await mortal.commit(heir, chunk("acme/a", 1, [6], attempt=2, finish=STOP))
    assert (await tokens(mortal), await living(mortal)) == (5, set())


async def test_all_choices_count(stage: Stage) -> None:
    worker = await stage.worker()
    await stage.submit("acme/a", worker, n=3, quota=Quota(tokens_per_minute=24))
    assert await tokens(stage) == 24
    await stage.claim(worker)
    steps = [chunk("acme/a", 0, [5] * (choice + 1), choice=choice, finish=STOP) for choice in range(3)]
    await stage.commit(worker, *steps)
    assert await tokens(stage) == 3 + 1 + 2 + 3


@on_both_servers
async def test_requests_of_a_minute(stage: Stage) -> None:
    """What was asked for runs out evenly: a third of a minute is worth one of three requests."""
    worker, quota = await stage.worker(), Quota(requests_per_minute=3)
    for name in ("a", "b", "c"):
        await stage.submit(f"acme/{name}", worker, quota=quota)
    error = await refused(stage, "acme/d", worker, quota)
    assert str(error) == "with this request it would be 4 requests in a minute, and 3 are allowed"
    assert error.retry_after_ms is not None
    assert 10_000 < error.retry_after_ms <= 20_000
    await passes(stage, error.retry_after_ms)
    await stage.submit("acme/d", worker, quota=quota)
    await refused(stage, "acme/e", worker, quota)
    await passes(stage, MINUTE_MS)
    for name in ("e", "f", "g"):
        await stage.submit(f"acme/{name}", worker, quota=quota)
    await refused(stage, "acme/h", worker, quota)


async def test_tokens_of_a_minute(stage: Stage) -> None:
    worker, quota = await stage.worker(), Quota(tokens_per_minute=25)
    await stage.running("acme/a", worker)  # without limits then: it is not charged, and gives nothing back
    await stage.submit("acme/b", worker, quota=quota)
    await stage.submit("acme/c", worker, quota=quota)
    error = await refused(stage, "acme/d", worker, quota)
    assert str(error) == "with this request it would be 30 tokens in a minute, and 25 are allowed"
    assert error.retry_after_ms is not None
    assert 10_000 < error.retry_after_ms <= 12_000
    await stage.commit(worker, chunk("acme/a", 0, [5], finish=STOP))
    await refused(stage, "acme/d", worker, quota)
    await stage.jobs.cancel("acme/b")
    await stage.submit("acme/d", worker, quota=quota)


async def test_one_that_never_fits_is_told_so(stage: Stage) -> None:
    worker = await stage.worker()
    error = await refused(stage, "acme/a", worker, Quota(tokens_per_minute=CHARGE - 1))
    assert error.retry_after_ms is None
    assert str(error) == (
        "with this request it would be 10 tokens in a minute, and 9 are allowed; "
        "ask for fewer: a shorter prompt, or less max_tokens"
    )


async def test_what_comes_back_late_makes_no_debt_and_no_credit(stage: Stage) -> None:
    """Its charge has run out before it ends."""
    worker, quota = await stage.worker(), Quota(tokens_per_minute=CHARGE)
    await stage.running("acme/a", worker)
    await stage.submit("acme/b", worker, quota=quota)
    await passes(stage, 2 * MINUTE_MS)
    await stage.jobs.cancel("acme/b")
    assert await tokens(stage) == 0
    await stage.submit("acme/c", worker, quota=quota)
    await refused(stage, "acme/d", worker, quota)


async def test_a_limit_that_comes_back_finds_nothing_of_before(stage: Stage) -> None:
    worker, both = await stage.worker(), Quota(requests_per_minute=9, tokens_per_minute=CHARGE)
    await stage.submit("acme/a", worker, quota=both)
    await passes(stage, 2 * MINUTE_MS)
    await stage.submit("acme/b", worker, quota=Quota(requests_per_minute=9))
    await stage.submit("acme/c", worker, quota=both)
    assert await tokens(stage) == CHARGE


async def test_what_is_refused_or_asked_again_is_not_charged(stage: Stage) -> None:
    worker, quota = await stage.worker(), Quota(requests_per_minute=9, tokens_per_minute=90, concurrency=9)
    for _ in range(3):
        submitted = await stage.submit("acme/a", worker, max_queue=1, quota=quota, caller="me")
        assert submitted is Submitted.ACCEPTED
    assert await stage.submit("acme/a", worker, max_queue=1, quota=quota, caller="you") is Submitted.ATTACHED
    with pytest.raises(QueueFull):
        await stage.submit("acme/b", worker, max_queue=1, quota=quota)
    await refused(stage, "acme/b", worker, Quota(requests_per_minute=9, tokens_per_minute=90, concurrency=1))
    found = await stage.broker.call("HMGET", stage.broker.keys.quota("acme"), "requests", "tokens")
    assert [float(each) for each in found] == [1, CHARGE]
    assert await living(stage) == {b"acme/a"}


@on_both_servers
async def test_many_gateways_see_one_account(stage: Stage) -> None:
    worker, quota = await stage.worker(), Quota(concurrency=5)

    async def ask(index: int) -> bool:
        try:
            await stage.submit(f"acme/{index}", worker, quota=quota, gateway=f"g{index % 3}")
        except OverQuota:
            return False
        return True

    assert sum(await asyncio.gather(*map(ask, range(40)))) == 5
    assert len(await living(stage)) == 5


async def test_jobs_that_somebody_deleted_do_not_count(stage: Stage) -> None:
    worker, quota = await stage.worker(), Quota(concurrency=1)
    await stage.submit("acme/a", worker, quota=quota)
    keys = stage.broker.keys
    await stage.broker.call("DEL", keys.job("acme/a"), keys.jobs(worker.id), keys.load(worker.id, worker.incarnation))
    await stage.submit("acme/b", worker, quota=quota)
    assert await living(stage) == {b"acme/b"}


@pytest.mark.parametrize("value", [("SET", "junk"), ("HSET", "requests", "junk", "tokens", "1e999", "at_ms", "soon")])
async def test_an_account_that_somebody_wrote_over_stops_nobody(stage: Stage, value: tuple[str, ...]) -> None:
    worker, quota = await stage.worker(), Quota(requests_per_minute=1, tokens_per_minute=CHARGE, concurrency=1)
    keys, (command, *rest) = stage.broker.keys, value
    await stage.broker.call(command, keys.quota("acme"), *rest)
    await stage.broker.call("SET", keys.live("acme"), "junk")
    await stage.submit("acme/a", worker, quota=quota)
    assert (await tokens(stage), await living(stage)) == (CHARGE, {b"acme/a"})
    await refused(stage, "acme/b", worker, quota)
    await stage.broker.call("DEL", keys.quota("acme"), keys.live("acme"))
    await stage.broker.call("SET", keys.quota("acme"), "junk", "PX", MINUTE_MS)
    await stage.broker.call("SET", keys.live("acme"), "junk", "PX", MINUTE_MS)
    assert await stage.jobs.cancel("acme/a") is Finished.ENDED


async def test_an_account_leaves_nothing_behind(stage: Stage) -> None:
    worker, quota = await stage.worker(), Quota(requests_per_minute=9, tokens_per_minute=90, concurrency=9)
    await stage.submit("acme/a", worker, quota=quota)
    keys = stage.broker.keys
    assert 0 < await stage.broker.call("PTTL", keys.quota("acme")) <= MINUTE_MS
    await stage.jobs.cancel("acme/a")
    assert await stage.broker.call("EXISTS", keys.live("acme")) == 0
    assert await stage.broker.call("HEXISTS", keys.job("acme/a"), "metered") == 0
