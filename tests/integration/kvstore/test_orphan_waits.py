"""Jobs for which there is no worker: how long they wait, from when on, and what it costs to look at them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Jobs, Rehomed, Target

from .conftest import SHORT_TTL_MS, Stage, settled, until

if TYPE_CHECKING:
    from kvstore.client import Broker
    from kvstore.orphans import Orphan

MOVED, WAITING, ENDED = Rehomed.MOVED, Rehomed.WAITING, Rehomed.ENDED
LONG_AGO = 1000


@pytest.fixture(autouse=True)
async def _settled(broker: Broker) -> None:
    await settled(broker)


@pytest.fixture
def hasty(broker: Broker) -> Jobs:
    """Of a gateway that waits for 50 ms."""
    return Jobs(broker, lease_ttl_ms=SHORT_TTL_MS, orphan_wait_s=0.05)


async def test_all_jobs_of_a_dead_worker_wait_together_however_many(mortal: Stage, hasty: Jobs, broker: Broker) -> None:
    """A look goes on where the last one ended: those in front hide nothing."""
    worker = await mortal.worker()
    await asyncio.gather(*(mortal.submit(f"r{number}", worker) for number in range(250)))
    await mortal.perish(worker)
    looks = [{one.request_id for one in await hasty.orphans()} for _ in range(4)]
    assert [len(each) for each in looks] == [100, 100, 50, 100]
    assert (looks[0] | looks[1] | looks[2], looks[3]) == ({f"r{number}" for number in range(250)}, looks[0])

    async def over() -> list[Orphan]:
        found = await hasty.orphans()
        return found if found and found[0].waited_ms > 50 else []

    ended = [await hasty.rehome(orphan, None) for orphan in await until(over)]
    for _ in range(3):
        ended += [await hasty.rehome(orphan, None) for orphan in await hasty.orphans()]
    assert ended == [ENDED] * 250
    assert await hasty.orphans() == []
    assert await broker.call("EXISTS", broker.keys.orphaned("w0"), broker.keys.jobs("w0")) == 0


async def test_what_was_read_by_past_lives_is_walked_too(mortal: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between entries that the live one has read."""
    monkeypatch.setattr("kvstore.orphans._BATCH", 2)
    first = await mortal.worker()
    for number in range(3):
        await mortal.submit(f"r{number}", first)
    await mortal.entries(first, 3)
    await mortal.perish(first)
    second = await mortal.worker()
    await mortal.submit("mine", second)
    await mortal.entries(second)
    looks = [[one.request_id for one in await mortal.jobs.orphans()] for _ in range(3)]
    assert looks == [["r0", "r1"], ["r2"], []]  # the third found the living one's, and begins again
    assert [one.request_id for one in await mortal.jobs.orphans()] == ["r0", "r1"]


async def test_a_look_at_those_that_wait_carries_no_prompts(mortal: Stage, broker: Broker) -> None:
    worker = await mortal.worker()
    for number in range(20):
        await mortal.submit(f"r{number}", worker, prompt=[1000] * 50_000)
    await mortal.perish(worker)

    async def sent() -> int:
        return int((await broker.call("INFO", "stats"))["total_net_output_bytes"])

    before = await sent()
    assert set((await mortal.rehome(None)).values()) == {WAITING}
    assert await sent() - before < 20_000


@pytest.mark.parametrize("how", ["woken", "woken, with an earlier life's jobs", "replaced"])
async def test_the_time_is_one_deaths(mortal: Stage, hasty: Jobs, broker: Broker, how: str) -> None:
    """What is left of an earlier one ends nothing."""
    if how == "woken, with an earlier life's jobs":
        past = await mortal.worker()
        await mortal.running("earlier", past)
        await mortal.perish(past)
    worker = await mortal.worker()
    await mortal.running("r1", worker)
    await mortal.running("r2", worker)
    await mortal.perish(worker)
    assert set((await mortal.rehome(None)).values()) == {WAITING}
    key, fate = broker.keys.orphaned("w0"), f"{worker.incarnation} died"
    assert 0 < await broker.call("PTTL", key) <= SHORT_TTL_MS
    await broker.call("HSET", key, fate, LONG_AGO)
    if how == "replaced":
        worker = await mortal.worker()
        assert set((await mortal.rehome(worker)).values()) == {MOVED}
        await mortal.claim(worker)
    else:
        assert (await mortal.registry.renew(worker)).held_lease
        found = await mortal.jobs.orphans()
        assert {one.request_id for one in found} == ({"earlier"} if "earlier" in how else set())

        async def forgotten() -> bool:
            return not await broker.call("HEXISTS", key, fate)

        assert await until(forgotten)
    await mortal.perish(worker)
    found = [one for one in await hasty.orphans() if one.incarnation == worker.incarnation]
    assert {one.request_id for one in found} >= {"r2"}
    assert {await hasty.rehome(orphan, None) for orphan in found} == {WAITING}


async def test_what_others_have_makes_no_job_wait_longer(mortal: Stage, broker: Broker) -> None:
    """Those may move, or wait their turn at a worker that is there; one that nobody can run has its time all the same.
    Should that worker go, theirs begins."""
    worker, other = await mortal.worker(), await mortal.worker("w1")
    names = ["moves", "first", "second", "nobody's"]
    for name in names:
        await mortal.submit(name, worker)
    for name in ("first", "second"):
        await broker.call("HSET", broker.keys.job(name), "deaths", 2)
    await mortal.perish(worker)
    assert await mortal.rehome(None) == dict.fromkeys(names, WAITING)
    await broker.call("HSET", broker.keys.orphaned("w0"), f"{worker.incarnation} died", LONG_AGO)

    target = Target("w1", other.incarnation, 3, 0)
    found = {one.request_id: one for one in await mortal.jobs.orphans()}
    moves = [await mortal.jobs.rehome(found[name], target) for name in ("moves", "first", "second")]
    assert moves == [MOVED, MOVED, WAITING]
    assert await mortal.rehome(None) == {"second": WAITING, "nobody's": ENDED}
    assert (await mortal.record("nobody's")).state == "ended"
    await broker.call("HSET", broker.keys.job("second"), "able_ms", LONG_AGO)
    assert await mortal.rehome(None) == {"second": ENDED}
