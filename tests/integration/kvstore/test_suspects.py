"""Jobs that a worker may have died of: one at a worker, until it has a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Commit, Rehomed, Target

from .conftest import Stage, chunk, settled

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo

MOVED, WAITING = Rehomed.MOVED, Rehomed.WAITING


@pytest.fixture(autouse=True)
async def _settled(broker: Broker) -> None:
    await settled(broker)


async def suspects(stage: Stage, *request_ids: str) -> None:
    """Jobs that ran at a worker that died, without a token."""
    worker = await stage.worker("w9")
    for request_id in request_ids:
        await stage.submit(request_id, worker)
    await stage.claim(worker)
    await stage.perish(worker)


async def orphaned_ms(broker: Broker, request_id: str) -> bytes | None:
    found: bytes | None = await broker.call("HGET", broker.keys.job(request_id), "orphaned_ms")
    return found


async def test_one_at_a_worker_and_the_others_wait_for_its_first_token(mortal: Stage, broker: Broker) -> None:
    await suspects(mortal, "a", "b", "c")
    assert set((await mortal.rehome(None)).values()) == {WAITING}
    assert await orphaned_ms(broker, "b") is not None
    target, other = await mortal.worker("w0"), await mortal.worker("w1")
    before = await mortal.load(target)
    # Who waits for its turn does not wait for a worker: that there is one ends that.
    assert await mortal.rehome(target) == {"a": MOVED, "b": WAITING, "c": WAITING}
    assert [await orphaned_ms(broker, each) for each in "abc"] == [None] * 3
    assert await mortal.rehome(target) == {"b": WAITING, "c": WAITING}
    assert (before, await mortal.load(target)) == ((0, 0), (1, 10))
    (claim,) = await mortal.claim(target)
    assert await mortal.rehome(target) == {"b": WAITING, "c": WAITING}
    assert await mortal.rehome(other) == {"b": MOVED, "c": WAITING}
    assert await mortal.commit(target, chunk("a", 0, [1], attempt=claim.attempt)) == [Commit.WRITTEN]
    assert await mortal.rehome(target) == {"c": MOVED}
    assert [(await mortal.record(each)).worker for each in "abc"] == ["w0", "w1", "w0"]


async def test_jobs_that_nobody_died_of_do_not_wait(mortal: Stage) -> None:
    await suspects(mortal, "a")
    worker, target = await mortal.worker("w8"), await mortal.worker("w0")
    assert await mortal.rehome(target) == {"a": MOVED}
    await mortal.submit("talks", worker)
    await mortal.claim(worker)
    await mortal.commit(worker, chunk("talks", 0, [1]))
    await mortal.submit("waits", worker)
    await mortal.perish(worker)
    assert await mortal.rehome(target) == {"talks": MOVED, "waits": MOVED}


@pytest.mark.parametrize("how", ["ended", "lost", "submitted anew", "moved", "trimmed", "another type"])
async def test_a_mark_says_nothing_without_its_job(mortal: Stage, broker: Broker, how: str) -> None:
    await suspects(mortal, "a", "b")
    target, keys = await mortal.worker("w0"), broker.keys
    assert await mortal.rehome(target) == {"a": MOVED, "b": WAITING}
    match how:
        case "ended":
            await mortal.jobs.cancel("a")
        case "lost":
            await broker.call("DEL", keys.job("a"))
        case "submitted anew":
            await broker.call("DEL", keys.job("a"))
            await mortal.submit("a", target)
        case "moved":
            await mortal.perish(target)
            other = await mortal.worker("w1")
            (moved,) = [each for each in await mortal.jobs.orphans() if each.job.request_id == "a"]
            assert await mortal.jobs.rehome(moved, Target("w1", other.incarnation, 3, 0)) is MOVED
            target = await mortal.worker("w0")
        case "trimmed":
            await broker.call("DEL", keys.jobs("w0"))
        case _:
            await broker.call("DEL", keys.suspect("w0"))
            await broker.call("LPUSH", keys.suspect("w0"), "a")
    assert await mortal.rehome(target) == {"b": MOVED}
    assert await broker.call("GET", keys.suspect("w0")) == b"b"
    assert 0 < await broker.call("PTTL", keys.suspect("w0")) <= 3600_000
    # What tests lose by hand nobody else clears up.
    await broker.call("DEL", keys.jobs("w0"), keys.load("w0", target.incarnation))


async def test_what_an_earlier_life_has_not_read_is_there_still(mortal: Stage) -> None:
    """The next one will read it; what that life had read is to be moved, and holds up nobody."""
    await suspects(mortal, "a", "b", "c")
    first = await mortal.worker("w0")
    assert (await mortal.rehome(first))["a"] is MOVED
    await mortal.perish(first)
    second = await mortal.worker("w0")
    assert await mortal.rehome(second) == {"b": WAITING, "c": WAITING}
    await mortal.claim(second)
    await mortal.perish(second)
    third = await mortal.worker("w0")
    moved = await mortal.rehome(third)
    assert sorted(moved.values(), key=str) == [MOVED, WAITING, WAITING]


async def test_it_is_not_taken_to_another_worker_by_a_thief(mortal: Stage) -> None:
    """Which takes what waits behind it."""
    await suspects(mortal, "a")
    victim, thief = (
        await mortal.worker("w0", prefill_tok_s=100.0, max_running=1),
        await mortal.worker("w1", prefill_tok_s=100.0, max_running=1),
    )
    assert await mortal.rehome(victim, prefill=100) == {"a": MOVED}

    async def steal() -> int | None:
        return await mortal.jobs.steal("w1", thief.incarnation, "w0", prefill_s_per_token=0.001, place_s=1.0)

    assert await steal() == 0
    await mortal.submit("r1", victim, prefill=3)
    assert (await steal(), await steal()) == (1, 0)
    assert [(await mortal.record(each)).worker for each in ("a", "r1")] == ["w0", "w1"]


async def test_a_token_ends_the_row_of_deaths(mortal: Stage) -> None:
    await suspects(mortal, "a")
    worker = await mortal.worker("w0")
    for _ in range(2):
        assert await mortal.rehome(worker) == {"a": MOVED}
        (claim,) = await mortal.claim(worker)
        assert (await mortal.record("a")).deaths == 1
        await die_after_a_token(mortal, worker, claim.attempt, claim.next[0])
        (orphan,) = await mortal.jobs.orphans()
        assert orphan.deaths == 0
        worker = await mortal.worker("w0")
        assert await mortal.rehome(worker) == {"a": MOVED}
        await mortal.claim(worker)
        await mortal.perish(worker)
        (orphan,) = await mortal.jobs.orphans()
        assert orphan.deaths == 1
        worker = await mortal.worker("w0")


async def die_after_a_token(stage: Stage, worker: WorkerInfo, attempt: int, start: int) -> None:
    step = chunk("a", start, [7], attempt=attempt)
    assert await stage.commit(worker, step) == [Commit.WRITTEN]
    await stage.perish(worker)
