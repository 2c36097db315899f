"""Jobs that an idle worker takes from another one's stream."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.jobs import Commit, Finished, JobState, Submitted
from kvstore.registry import DRAINING, Load, WorkerInfo
from octavo.v1 import inference_pb2

from .conftest import Stage, chunk, on_both_servers

if TYPE_CHECKING:
    from kvstore.client import Broker

pytestmark = on_both_servers

# A victim that computes 100 prompt tokens in a second and has one place; so does the thief.
RATES: dict[str, Any] = {"prefill_tok_s": 100.0, "max_running": 1}
PACE = 0.01


async def pair(stage: Stage) -> tuple[WorkerInfo, WorkerInfo]:
    """Victim and thief."""
    return await stage.worker("w0", **RATES), await stage.worker("w1", **RATES)


async def steal(stage: Stage, thief: WorkerInfo, victim: WorkerInfo, **terms: Any) -> int | None:
    return await stage.jobs.steal(thief.id, thief.incarnation, victim.id, **({"prefill_s_per_token": PACE} | terms))


async def loads(stage: Stage, *workers: WorkerInfo) -> list[Load]:
    found = await stage.registry.loads(workers)
    return [found[worker.id] for worker in workers]


async def test_a_job_moves_with_all_that_belongs_to_it(stage: Stage, broker: Broker) -> None:
    victim, thief = await pair(stage)
    await stage.submit("reading", victim, prefill=3)
    await stage.claim(victim)
    await stage.submit("r1", victim, prompt=range(20), prefill=4, predicted=16, deadline_ms=60_000)
    await stage.submit("r2", victim, prefill=3)
    assert await loads(stage, victim, thief) == [Load(3, 47, 10, 3), Load()]
    before = await stage.record("r1")

    assert await steal(stage, thief, victim, place_s=1.0) == 1
    assert await loads(stage, victim, thief) == [Load(2, 20, 6, 2), Load(1, 27, 20, 1)]
    record = await stage.record("r1")
    assert (record.state, record.attempt, record.submitted_ms) == (JobState.QUEUED, 0, before.submitted_ms)
    assert (record.worker, record.worker_incarnation, record.stolen_from) == ("w1", thief.incarnation, "w0")
    assert (before.predicted, record.predicted) == (16, 0)
    assert [(each.worker, each.undelivered, each.pending) for each in await stage.jobs.queues()] == [
        ("w0", 1, 1),
        ("w1", 1, 0),
    ]

    # The victim never sees it, the thief runs it like any other.
    assert [claim.job.request_id for claim in await stage.claim(victim)] == ["r2"]
    (claim,) = await stage.claim(thief)
    assert (claim.job.request_id, claim.attempt, claim.gateway) == ("r1", 1, stage.gateway)
    assert await stage.commit(thief, chunk("r1", 0, [5])) == [Commit.WRITTEN]
    assert await loads(stage, thief) == [Load(1, 27, 0, 1)]
    assert await stage.commit(thief, chunk("r1", 1, [6], finish=inference_pb2.STOP)) == [Commit.WRITTEN]
    assert await broker.call("EXISTS", broker.keys.load("w1", thief.incarnation)) == 0
    # Submitted again after a lost reply, it is known.
    assert await stage.submit("r1", victim, prompt=range(20)) is Submitted.ATTACHED


async def test_what_has_been_read_is_never_taken(stage: Stage) -> None:
    victim, thief = await pair(stage)
    for number in range(3):
        await stage.submit(f"r{number}", victim, prefill=100)
    entries = await stage.entries(victim, count=2)
    # Read and not claimed yet: its reply may be on its way.
    assert [entry.request_id for entry in entries] == ["r0", "r1"]
    assert await steal(stage, thief, victim) == 1
    assert await steal(stage, thief, victim) == 0
    assert (await stage.record("r2")).worker == "w1"
    claims = await stage.jobs.claim(victim.id, victim.incarnation, entries)
    assert [claim.job.request_id for claim in claims] == ["r0", "r1"]


@pytest.mark.parametrize(
    ("prefill", "prompt", "place_s", "margin_s", "taken"),
    [
        # One prompt of 100 before it takes 1 s; then its own 20 of 120 at the victim, all 120 at the thief: 1.2 s each.
        (20, 120, 0.0, 0.0, 0),
        (21, 120, 0.0, 0.0, 1),
        (21, 120, 0.0, 0.02, 0),
        # What is cached at the victim is worth the wait.
        (1, 120, 0.0, 0.0, 0),
        # A place is lacking, too.
        (1, 120, 0.1, 0.0, 0),
        (1, 120, 0.2, 0.0, 1),
    ],
)
async def test_taken_when_it_starts_sooner(
    stage: Stage, prefill: int, prompt: int, place_s: float, margin_s: float, taken: int
) -> None:
    victim, thief = await pair(stage)
    await stage.submit("reading", victim, prompt=range(100), prefill=100)
    await stage.claim(victim)
    await stage.submit("r1", victim, prompt=range(prompt), prefill=prefill, predicted=prompt - prefill)
    assert await steal(stage, thief, victim, place_s=place_s, margin_s=margin_s) == taken


async def test_the_first_that_is_worth_it(stage: Stage) -> None:
    """Each waits for those before it; what is cached at the victim stays there while the wait is short."""
    victim, thief = await pair(stage)
    await stage.submit("r0", victim, prompt=range(100), prefill=100)  # 1.00 s at the victim, 1.00 at the thief
    await stage.submit("r1", victim, prompt=range(300), prefill=10)  # 1.10 and 3.00
    await stage.submit("r2", victim, prompt=range(110), prefill=10)  # 1.20 and 1.10
    assert await steal(stage, thief, victim, max_look=2) == 0
    assert await steal(stage, thief, victim) == 1
    assert (await stage.record("r2")).worker == "w1"
    assert await steal(stage, thief, victim) == 0
    # A thief that is faster takes what waits for nobody, but not to have it wait here.
    assert await steal(stage, thief, victim, prefill_s_per_token=0.009) == 0
    assert await stage.jobs.cancel("r2") is Finished.ENDED
    assert await steal(stage, thief, victim, prefill_s_per_token=0.009) == 1
    assert (await stage.record("r0")).worker == "w1"


@pytest.mark.parametrize(
    ("here", "place_s", "taken"),
    [
        # At the victim: 100 tokens before it and 100 of its own, 2 s; and one place lacks. At the thief: 1 s.
        ({"prompt": range(99), "prefill": 99}, 0.0, 1),
        ({"prompt": range(100), "prefill": 100}, 0.0, 0),
        # One lacks at the thief as well.
        ({"prompt": range(100), "prefill": 100}, 1.0, 0),
        ({"n": 2}, 1.0, 0),
        ({"n": 2}, 0.4, 1),
    ],
)
async def test_what_has_come_to_the_thief_meanwhile_counts(
    stage: Stage, here: dict[str, Any], place_s: float, taken: int
) -> None:
    victim, thief = await pair(stage)
    await stage.submit("reading", victim, prompt=range(100), prefill=100)
    await stage.claim(victim)
    await stage.submit("r1", victim, prompt=range(100), prefill=100)
    await stage.submit("here", thief, **here)
    assert await steal(stage, thief, victim, place_s=place_s) == taken


@pytest.mark.parametrize(("waiting", "max_running", "taken"), [(1, 4, 0), (2, 4, 1), (2, 5, 0), (1, 3, 1)])
async def test_all_sequences_need_places(stage: Stage, waiting: int, max_running: int, taken: int) -> None:
    """Of a job with three choices, and of those that wait before the one in question."""
    victim, thief = await stage.worker("w0", **RATES | {"max_running": max_running}), await stage.worker("w1", **RATES)
    await stage.submit("reading", victim, n=3)
    await stage.claim(victim)
    for number in range(waiting):
        await stage.submit(f"r{number}", victim)
    assert await steal(stage, thief, victim, place_s=1.0) == taken


async def test_a_victim_that_has_not_measured_itself_is_as_fast_as_the_thief(stage: Stage) -> None:
    victim, thief = await stage.worker("w0"), await stage.worker("w1")
    await stage.submit("r0", victim, prompt=range(100), prefill=100)
    await stage.submit("r1", victim, prompt=range(100), prefill=1)
    assert await steal(stage, thief, victim) == 1
    assert (await stage.record("r1")).worker == "w1"


async def test_who_cannot_trade(stage: Stage) -> None:
    victim, thief = await pair(stage)
    await stage.submit("r1", victim, prefill=3)
    strangers = {
        "pages of other bits": await stage.worker("w2", **RATES | {"fingerprint": "g"}),
        "another name": await stage.worker("w3", **RATES | {"model": "n"}),
        "draining": await stage.worker("w4", **RATES | {"state": DRAINING}),
        "replaced": replace(thief, incarnation="0" * 16),
        "no lease": replace(thief, id="w5"),
        "itself": victim,
    }
    for who, worker in strangers.items():
        assert await steal(stage, worker, victim, place_s=9.0) is None, who
    assert await steal(stage, thief, strangers["no lease"], place_s=9.0) is None
    small = await stage.worker("w6", context_length=9, **RATES)
    assert await steal(stage, small, victim, place_s=9.0, margin_s=0.0) == 0
    assert (await stage.record("r1")).worker == "w0"
    fits = await stage.worker("w7", context_length=10, **RATES | {"prefill_tok_s": 101.0})
    assert await steal(stage, fits, victim, prefill_s_per_token=0.009) == 1


@pytest.mark.parametrize(
    "terms",
    [
        {"prefill_s_per_token": 0.0},
        {"prefill_s_per_token": float("inf")},
        {"place_s": -1.0},
        {"margin_s": float("nan")},
        {"max_look": 0},
    ],
)
async def test_what_is_no_time_is_refused(stage: Stage, terms: dict[str, Any]) -> None:
    victim, thief = await pair(stage)
    with pytest.raises(ValueError, match=r"is not above 0|out of range"):
        await steal(stage, thief, victim, **terms)


async def test_a_job_that_ended_in_the_queue_is_not_there_to_take(stage: Stage) -> None:
    victim, thief = await pair(stage)
    await stage.submit("r1", victim, prefill=3)
    await stage.submit("r2", victim, prefill=3)
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    assert await steal(stage, thief, victim, prefill_s_per_token=0.001) == 1
    assert await steal(stage, thief, victim, prefill_s_per_token=0.001) == 0
    assert (await stage.record("r2")).worker == "w1"
    # Cancelled at the thief, it leaves nothing there either.
    assert await stage.jobs.cancel("r2") is Finished.ENDED
    assert await loads(stage, victim, thief) == [Load(), Load()]


async def test_each_job_goes_to_one_thief(stage: Stage, broker: Broker) -> None:
    """Many thieves, and a victim that reads meanwhile."""
    victim = await stage.worker("w0", **RATES)
    thieves = [await stage.worker(f"w{number}", **RATES) for number in range(1, 6)]
    ids = [f"r{number}" for number in range(40)]
    assert await stage.jobs.next_entries(stage.reader, victim.id, victim.incarnation, 1, 1) == []
    for request_id in ids:
        await stage.submit(request_id, victim, prefill=3)

    async def rob(thief: WorkerInfo) -> int:
        taken = 0
        while await steal(stage, thief, victim, prefill_s_per_token=0.001):
            taken += 1
        return taken

    async def read() -> list[str]:
        claimed: list[str] = []
        while found := await stage.jobs.next_entries(stage.reader, victim.id, victim.incarnation, 3, 1):
            claimed += [one.job.request_id for one in await stage.jobs.claim(victim.id, victim.incarnation, found)]
        return claimed

    reading = asyncio.create_task(read())
    taken = await asyncio.gather(*map(rob, thieves))
    claimed = await reading
    assert len(claimed) + sum(taken) == len(ids)
    holders = {request_id: (await stage.record(request_id)).worker for request_id in ids}
    assert sorted(claimed) == sorted(request_id for request_id, worker in holders.items() if worker == "w0")
    for thief, count in zip(thieves, taken, strict=True):
        assert list(holders.values()).count(thief.id) == count
        assert await broker.call("XLEN", broker.keys.jobs(thief.id)) == count
    assert sum(load.prefill for load in await loads(stage, victim, *thieves)) == 3 * len(ids)


async def test_keys_of_other_types_are_left_alone(stage: Stage, broker: Broker) -> None:
    victim, thief = await pair(stage)
    await stage.submit("r1", victim, prefill=3)
    await broker.call("SET", broker.keys.jobs("w1"), "x", "PX", 60_000)
    assert await steal(stage, thief, victim, prefill_s_per_token=0.001) is None
    assert (await stage.record("r1")).worker == "w0"
    await broker.call("DEL", broker.keys.jobs("w1"))
    await broker.call("XADD", broker.keys.jobs("w1"), "*", "request", "nobody")
    await broker.call("XADD", broker.keys.jobs("w1"), "*", "a", "b", "c", "d")
    assert await steal(stage, victim, thief, prefill_s_per_token=0.001) == 0
    await broker.call("DEL", broker.keys.jobs("w1"))
    assert await steal(stage, thief, victim, prefill_s_per_token=0.001) == 1
