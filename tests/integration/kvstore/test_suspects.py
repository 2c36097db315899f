"""Jobs that workers may have died of: those with two deaths are alone at a worker, until they have sixteen tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.jobs import Commit, Rehomed, Target
from octavo.v1 import inference_pb2

from .conftest import Stage, chunk, settled

if TYPE_CHECKING:
    from kvstore.client import Broker

MOVED, WAITING = Rehomed.MOVED, Rehomed.WAITING
PROVEN = [7] * 16


@pytest.fixture(autouse=True)
async def _settled(broker: Broker) -> None:
    await settled(broker)


async def suspects(stage: Stage, *request_ids: str, deaths: int = 2) -> None:
    """Jobs that ran at so many workers that died, the last of them w9, without a token."""
    for number in range(deaths):
        worker = await stage.worker("w9")
        if number:
            await stage.rehome(worker)
        else:
            for request_id in request_ids:
                await stage.submit(request_id, worker)
        assert len(await stage.claim(worker)) == len(request_ids)
        await stage.perish(worker)


async def test_after_one_death_all_go_on_at_once(mortal: Stage) -> None:
    """They were there when a worker died: of one of them at most, and it is not known of which."""
    await suspects(mortal, *"abc", deaths=1)
    target = await mortal.worker("w0")
    assert await mortal.rehome(target) == dict.fromkeys("abc", MOVED)
    assert [claim.attempt for claim in await mortal.claim(target)] == [2] * 3


async def test_who_must_be_alone_meets_no_other_suspect_whoever_comes_first(mortal: Stage) -> None:
    await suspects(mortal, "twice")
    first, second = await mortal.worker("w0"), await mortal.worker("w1")
    assert await mortal.rehome(first) == {"twice": MOVED}
    await suspects(mortal, "once", "more", deaths=1)
    assert await mortal.rehome(first) == {"once": WAITING, "more": WAITING}
    assert await mortal.rehome(second) == {"once": MOVED, "more": MOVED}
    claims = {claim.job.request_id: claim for claim in await mortal.claim(second)}
    await mortal.perish(first)
    assert await mortal.rehome(second) == {"twice": WAITING}
    for each in claims.values():
        assert await mortal.commit(second, chunk(each.job.request_id, 0, PROVEN, attempt=2)) == [Commit.WRITTEN]
    assert await mortal.rehome(second) == {"twice": MOVED}


async def test_one_at_a_worker_and_the_others_wait_until_it_is_proven(mortal: Stage) -> None:
    await suspects(mortal, "a", "b", "c")
    assert set((await mortal.rehome(None)).values()) == {WAITING}
    target, other = await mortal.worker("w0"), await mortal.worker("w1")
    before = await mortal.load(target)
    assert await mortal.rehome(target) == {"a": MOVED, "b": WAITING, "c": WAITING}
    assert await mortal.rehome(target) == {"b": WAITING, "c": WAITING}
    assert (before, await mortal.load(target)) == ((0, 0), (1, 10))
    (claim,) = await mortal.claim(target)
    assert await mortal.rehome(target) == {"b": WAITING, "c": WAITING}
    assert await mortal.rehome(other) == {"b": MOVED, "c": WAITING}
    assert await mortal.commit(target, chunk("a", 0, PROVEN[:15], attempt=claim.attempt)) == [Commit.WRITTEN]
    assert await mortal.rehome(target) == {"c": WAITING}
    assert await mortal.commit(target, chunk("a", 15, [1], attempt=claim.attempt)) == [Commit.WRITTEN]
    assert await mortal.rehome(target) == {"c": MOVED}
    assert [(await mortal.record(each)).worker for each in "abc"] == ["w0", "w1", "w0"]


async def test_jobs_that_nobody_died_of_do_not_wait(mortal: Stage) -> None:
    await suspects(mortal, "a")
    worker, target = await mortal.worker("w8"), await mortal.worker("w0")
    assert await mortal.rehome(target) == {"a": MOVED}
    await mortal.submit("talks", worker)
    await mortal.claim(worker)
    await mortal.commit(worker, chunk("talks", 0, PROVEN))
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
            (moved,) = [each for each in await mortal.jobs.orphans() if each.request_id == "a"]
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
    """The next one will read it; what that life had read is given up, and holds up nobody."""
    await suspects(mortal, "a", "b", "c")
    first = await mortal.worker("w0")
    assert (await mortal.rehome(first))["a"] is MOVED
    await mortal.perish(first)
    second = await mortal.worker("w0")
    assert await mortal.rehome(second) == {"b": WAITING, "c": WAITING}
    await mortal.claim(second)
    await mortal.perish(second)
    third = await mortal.worker("w0")
    assert await mortal.rehome(third) == {"a": Rehomed.DEAD, "b": MOVED, "c": WAITING}


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


async def test_sixteen_tokens_of_one_life_end_the_row_of_deaths(mortal: Stage) -> None:
    await suspects(mortal, "a", deaths=1)
    worker = await mortal.worker("w0")
    deaths: list[int] = []
    for tokens in (16, 0, 15, 17):
        assert await mortal.rehome(worker) == {"a": MOVED}
        (claim,) = await mortal.claim(worker)
        if tokens:
            step = chunk("a", claim.next[0], [7] * tokens, attempt=claim.attempt)
            assert await mortal.commit(worker, step) == [Commit.WRITTEN]
        await mortal.perish(worker)
        (orphan,) = await mortal.jobs.orphans()
        deaths.append(orphan.deaths)
        worker = await mortal.worker("w0")
    assert deaths == [0, 1, 2, 0]


async def test_of_several_choices_each_open_one_counts(mortal: Stage) -> None:
    """What kills with the third step of eight answers has told more than sixteen tokens by then."""
    worker = await mortal.worker("w0")
    deaths: list[int] = []
    await mortal.submit("a", worker, n=2)
    for tokens in (8, 16):
        (claim,) = await mortal.claim(worker)
        steps = [chunk("a", claim.next[one], [7] * tokens, choice=one, attempt=claim.attempt) for one in (0, 1)]
        assert await mortal.commit(worker, *steps) == [Commit.WRITTEN] * 2
        await mortal.perish(worker)
        (orphan,) = await mortal.jobs.orphans()
        deaths.append(orphan.deaths)
        worker = await mortal.worker("w0")
        assert await mortal.rehome(worker) == {"a": MOVED}
    assert deaths == [1, 0]
    (claim,) = await mortal.claim(worker)
    end = chunk("a", 24, [], choice=1, attempt=3, finish=inference_pb2.LENGTH)
    assert await mortal.commit(worker, end, chunk("a", 24, [7] * 16, attempt=3)) == [Commit.WRITTEN] * 2
    await mortal.perish(worker)
    assert (await mortal.jobs.orphans())[0].deaths == 0
