"""A theft by what the thief holds: what it is told of the jobs that wait, and what becomes of its answer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.block_hash import TOKEN_BYTES
from kvstore.jobs import Commit, Finished
from kvstore.registry import Load, WorkerInfo
from kvstore.scripts import load_scripts
from kvstore.stealing import MAX_PEEK_BYTES, Waiting, peek

from .conftest import Stage, chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Broker

    from .proxy import Proxy

# Both compute 100 prompt tokens in a second and have one place.
RATES: dict[str, Any] = {"prefill_tok_s": 100.0, "max_running": 1}
PACE = 0.01


async def pair(stage: Stage) -> tuple[WorkerInfo, WorkerInfo]:
    """Victim and thief."""
    return await stage.worker("w0", **RATES), await stage.worker("w1", **RATES)


async def steal(stage: Stage, thief: WorkerInfo, victim: WorkerInfo, held: dict[str, int], **terms: Any) -> int | None:
    """``held``: by request id, as of now."""
    entries = {each.job.request_id: each.entry_id for each in await peek(stage.broker, victim.id)}
    pairs = [(entries[request_id], tokens) for request_id, tokens in held.items()]
    return await stolen(stage, thief, victim, pairs, **terms)


async def stolen(
    stage: Stage, thief: WorkerInfo, victim: WorkerInfo, held: Sequence[tuple[str, int]], **terms: Any
) -> int | None:
    terms = {"prefill_s_per_token": PACE} | terms
    return await stage.jobs.steal(thief.id, thief.incarnation, victim.id, held=held, **terms)


async def loads(stage: Stage, *workers: WorkerInfo) -> list[Load]:
    found = await stage.registry.loads(workers)
    return [found[worker.id] for worker in workers]


async def seen(stage: Stage, *given: Any, **more: Any) -> list[str]:
    """Request ids of what is told about w0."""
    return [each.job.request_id for each in await peek(stage.broker, "w0", *given, **more)]


async def test_unread_jobs_are_told_with_their_prompts_and_no_others(stage: Stage, broker: Broker) -> None:
    victim, thief = await pair(stage)
    assert await seen(stage) == []
    for number in range(6):
        await stage.submit(f"r{number}", victim, prompt=range(number + 1), prefill=number + 1)
    assert await seen(stage) == ["r0", "r1", "r2", "r3", "r4", "r5"]  # a stream that nobody has read yet
    await stage.entries(victim, count=2)
    assert await stage.jobs.cancel("r3") is Finished.ENDED
    assert await steal(stage, thief, victim, {}, prefill_s_per_token=0.001) == 1
    told = await peek(broker, "w0")
    assert [(each.job.request_id, [*each.job.prompt_token_ids]) for each in told] == [
        ("r4", [0, 1, 2, 3, 4]),
        ("r5", [0, 1, 2, 3, 4, 5]),
    ]
    entries = await broker.call("XRANGE", broker.keys.jobs("w0"), "-", "+")
    assert [each.entry_id.encode() for each in told] == [entry for entry, _ in entries[-2:]]
    # Of the job that was taken its new worker tells.
    assert [each.job.request_id for each in await peek(broker, "w1")] == ["r2"]


async def test_what_is_known_is_not_told_again(stage: Stage) -> None:
    victim, _ = await pair(stage)
    for number in range(4):
        await stage.submit(f"r{number}", victim)
    told = await peek(stage.broker, "w0")
    assert await seen(stage, known=[told[0].entry_id, told[2].entry_id]) == ["r1", "r3"]
    assert await seen(stage, count=3, known=[told[0].entry_id]) == ["r1", "r2"]
    assert await seen(stage, count=1) == ["r0"]
    with pytest.raises(ValueError, match="count 0 is below 1"):
        await seen(stage, count=0)


async def test_long_payloads_are_left_out_and_answers_are_bounded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, _ = await pair(stage)
    await stage.submit("r0", victim, prompt=[7] * (MAX_PEEK_BYTES // TOKEN_BYTES))
    for number in range(1, 4):
        await stage.submit(f"r{number}", victim, prompt=[7] * 900)
    assert await seen(stage) == ["r1", "r2", "r3"]
    monkeypatch.setattr("kvstore.stealing.MAX_PEEK_TOTAL", 8000)
    told = await peek(stage.broker, "w0")
    assert [each.job.request_id for each in told] == ["r1", "r2"]
    # Those that had no room come when the others are known.
    assert await seen(stage, known=[each.entry_id for each in told]) == ["r3"]


async def test_what_others_wrote_is_no_job(stage: Stage, broker: Broker) -> None:
    victim, _ = await pair(stage)
    keys = broker.keys
    await broker.call("XADD", keys.jobs("w0"), "*", "request", "nobody")
    await broker.call("XADD", keys.jobs("w0"), "*", "a", "b", "c", "d")
    for number in range(4):
        await stage.submit(f"r{number}", victim)
    await broker.call("HSET", keys.job("r0"), "payload", b"\xff")
    await broker.call("HDEL", keys.job("r1"), "payload")
    await broker.call("HSET", keys.job("r2"), "entry", "1-0")
    assert await seen(stage) == ["r3"]
    await broker.call("SET", keys.jobs("w1"), "x", "PX", 60_000)
    assert await peek(broker, "w1") == []
    assert await peek(broker, "w2") == []
    await broker.call("DEL", keys.jobs("w1"))
    await broker.call("DEL", keys.jobs("w0"))  # with what names no job


async def test_a_job_is_charged_and_predicted_by_what_the_thief_holds(stage: Stage) -> None:
    victim, thief = await pair(stage)
    await stage.submit("r0", victim, prompt=range(100), prefill=100)
    await stage.submit("r1", victim, prompt=range(40), prefill=8, predicted=32)
    assert await steal(stage, thief, victim, {"r1": 16}) == 1  # 0.24 s here; 1.08 there
    record = await stage.record("r1")
    assert (record.worker, record.predicted, record.prompt_tokens) == ("w1", 16, 40)
    assert await loads(stage, victim, thief) == [Load(1, 107, 100, 1), Load(1, 47, 24, 1)]
    assert await stage.jobs.cancel("r0") is Finished.ENDED
    # Taken back, it is predicted by what that one holds.
    assert await steal(stage, victim, thief, {"r1": 32}) == 1
    assert (await stage.record("r1")).predicted == 32
    assert await loads(stage, victim, thief) == [Load(1, 47, 8, 1), Load()]
    await stage.claim(victim)
    assert await stage.commit(victim, chunk("r1", 0, [5])) == [Commit.WRITTEN]
    assert await loads(stage, victim) == [Load(1, 47, 0, 1)]


@pytest.mark.parametrize(
    ("held", "margin_s", "taken"),
    [
        # 100 tokens before it and 20 of its own at the victim: 1.2 s. At the thief, 120 less what it has.
        (0, 0.0, 0),
        (1, 0.0, 1),
        (16, 0.15, 1),
        (16, 0.16, 0),
        (112, 1.1, 1),
        (112, 1.12, 0),
    ],
)
async def test_what_the_thief_holds_makes_it_worth_while(stage: Stage, held: int, margin_s: float, taken: int) -> None:
    victim, thief = await pair(stage)
    await stage.submit("reading", victim, prompt=range(100), prefill=100)
    await stage.claim(victim)
    await stage.submit("r1", victim, prompt=range(120), prefill=20, predicted=100)
    assert await steal(stage, thief, victim, {"r1": held}, margin_s=margin_s) == taken
    assert (await stage.record("r1")).predicted == (held if taken else 100)


async def test_the_first_that_is_worth_it_by_what_is_held(stage: Stage) -> None:
    victim, thief = await pair(stage)
    # 0.5, 0.7 and 0.9 s at the victim; each 1 s at the thief, if that holds nothing.
    await stage.submit("r0", victim, prompt=range(100), prefill=50, predicted=50)
    await stage.submit("r1", victim, prompt=range(100), prefill=20, predicted=80)
    await stage.submit("r2", victim, prompt=range(100), prefill=20, predicted=80)
    assert await steal(stage, thief, victim, {}) == 0
    assert await steal(stage, thief, victim, {"r0": 48, "r1": 16, "r2": 64}) == 1
    assert (await stage.record("r2")).predicted == 64
    assert await steal(stage, thief, victim, {"r0": 96, "r1": 96}) == 1
    assert (await stage.record("r0")).predicted == 96


@pytest.mark.parametrize(("held", "predicted"), [(19, 19), (20, 19), (21, 19), (10**14, 19), (10**16, 0), (-5, 0)])
async def test_a_last_token_is_always_computed_and_nonsense_is_nothing(stage: Stage, held: int, predicted: int) -> None:
    victim, thief = await pair(stage)
    await stage.submit("r1", victim, prompt=range(20), prefill=20)
    assert await steal(stage, thief, victim, {"r1": held}, prefill_s_per_token=0.001) == 1
    assert (await stage.record("r1")).predicted == predicted
    assert await loads(stage, thief) == [Load(1, 27, 20 - predicted, 1)]


async def test_what_a_job_has_said_is_computed_as_well(stage: Stage) -> None:
    """One that goes on at another worker is charged its prompt and the tokens of its log."""
    victim, thief = await pair(stage)
    await stage.submit("r1", victim, prompt=range(20), prefill=9, predicted=16)  # 5 of its answer
    assert await steal(stage, thief, victim, {"r1": 20}, prefill_s_per_token=0.001) == 1
    assert (await stage.record("r1")).predicted == 20
    assert await loads(stage, thief) == [Load(1, 27, 5, 1)]


async def test_what_was_read_moved_or_ended_since_the_look_is_not_taken(stage: Stage) -> None:
    victim, thief = await pair(stage)
    third = await stage.worker("w2", **RATES)
    for number in range(4):
        await stage.submit(f"r{number}", victim, prefill=3)
    held = [(each.entry_id, 2) for each in await peek(stage.broker, "w0")]
    await stage.entries(victim, count=1)
    assert await stolen(stage, third, victim, [], prefill_s_per_token=0.001) == 1
    assert await stage.jobs.cancel("r2") is Finished.ENDED
    assert await stolen(stage, thief, victim, held, prefill_s_per_token=0.001) == 1
    assert [(await stage.record(f"r{number}")).worker for number in range(4)] == ["w0", "w2", "w0", "w1"]
    assert await stolen(stage, thief, victim, held, prefill_s_per_token=0.001) == 0


async def test_a_look_does_not_speak_for_a_job_submitted_anew_under_its_id(stage: Stage, broker: Broker) -> None:
    victim, thief = await pair(stage)
    await stage.submit("r1", victim, prompt=range(20), prefill=20)
    held = [(each.entry_id, 16) for each in await peek(broker, "w0")]
    assert await stage.jobs.cancel("r1") is Finished.ENDED
    await broker.call("DEL", broker.keys.job("r1"))  # its retention is over
    await stage.submit("r1", victim, prompt=range(50, 70), prefill=20)
    assert await stolen(stage, thief, victim, held, prefill_s_per_token=0.001) == 1
    assert (await stage.record("r1")).predicted == 0
    assert await loads(stage, thief) == [Load(1, 27, 20, 1)]


async def test_a_theft_repeated_after_a_lost_reply_charges_each_by_its_own(
    far: Stage, proxy: Proxy, broker: Broker
) -> None:
    victim, thief = await far.worker("w0", prefill_tok_s=1.0), await far.worker("w1")
    for number in range(3):
        await far.submit(f"r{number}", victim, prompt=range(20), prefill=20)
    told = await peek(broker, "w0")
    for script in load_scripts().values():
        await broker.call("SCRIPT", "LOAD", script.source)
    proxy.lose = load_scripts()["steal"].sha1.encode()
    held = [(each.entry_id, 4 * number) for number, each in enumerate(told)]
    assert await stolen(far, thief, victim, held) == 1
    assert proxy.lost == 1
    assert [(await far.record(f"r{number}")).predicted for number in range(3)] == [0, 4, 0]
    assert [(await far.record(f"r{number}")).worker for number in range(3)] == ["w1", "w1", "w0"]
    assert await loads(far, victim, thief) == [Load(1, 27, 20, 1), Load(2, 54, 36, 2)]


@pytest.mark.parametrize("seed", range(3))
async def test_charges_and_predictions_add_up_whatever_is_said_to_be_held(stage: Stage, seed: int) -> None:
    """After each of many random thefts and starts: each load is the sum of its jobs, and what a job is charged and
    what it is predicted to find make up its prompt."""
    dice, broker = random.Random(seed), stage.broker
    workers = [await stage.worker(f"w{number}", **RATES) for number in range(3)]
    prompts: dict[str, int] = {}
    thefts = 0
    for number in range(120):
        prompt = dice.randrange(1, 60)
        predicted = dice.randrange(prompt)
        prompts[f"r{number}"] = prompt
        target = dice.choice(workers)
        await stage.submit(f"r{number}", target, prompt=range(prompt), prefill=prompt - predicted, predicted=predicted)
        thief, victim = dice.sample(workers, 2)
        told: list[Waiting] = await peek(broker, victim.id)
        held = [(each.entry_id, dice.randrange(70)) for each in told if dice.random() < 0.7]
        thefts += await stolen(stage, thief, victim, held, prefill_s_per_token=0.008) or 0
        if dice.random() < 0.2:
            reader = dice.choice(workers)
            entries = await stage.jobs.next_entries(stage.reader, reader.id, reader.incarnation, 2, 1)
            claims = await stage.jobs.claim(reader.id, reader.incarnation, entries)
            await stage.commit(reader, *[chunk(claim.job.request_id, 0, [1]) for claim in claims])
        await check(stage, workers, prompts)
    assert thefts > 10


async def check(stage: Stage, workers: Sequence[WorkerInfo], prompts: dict[str, int]) -> None:
    charged = {worker.id: 0 for worker in workers}
    keys = stage.broker.keys
    fields = ("worker", "prefill", "predicted")
    found = await stage.broker.pipeline([("HMGET", keys.job(request_id), *fields) for request_id in prompts])
    for (worker, prefill, predicted), prompt in zip(found, prompts.values(), strict=True):
        if prefill is not None:  # it has not started
            charged[worker.decode()] += int(prefill)
            assert int(prefill) + int(predicted) == prompt
    assert [load.prefill for load in await loads(stage, *workers)] == [*charged.values()]
