"""Leases with real TTLs, loads and model cards."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import WorkerIdTaken
from kvstore.registry import DRAINING, Load, ModelCard, Registry, WorkerInfo, new_incarnation

from .conftest import SHORT_TTL_MS, Stage, until

if TYPE_CHECKING:
    from kvstore.client import Broker

INFO = WorkerInfo(
    id="w0",
    incarnation="0123456789abcdef",
    model="smollm2-135m",
    fingerprint="fp",
    tokenizer="0" * 64,
    state="ready",
    device="cpu",
    dtype="bfloat16",
    block_size=16,
    context_length=8192,
    vocab_size=49152,
    kv_tokens=16384,
    max_running=32,
    running=3,
    waiting=2,
    blocks_free=1000,
    blocks_cached=20,
    blocks_used=4,
    prefill_tok_s=2512.75,
    step_ms=11.9,
    sequence_ms=1e-05,
    fetch_tok_s=90_000.0,
    index="exact",
    metrics="127.0.0.1:9000",
)

CARD = ModelCard(
    fingerprint="fp",
    vocab_size=49152,
    eos_token_ids=(2, 0),
    tokenizer_json=b'{"version": "1.0"}' * 1000,
    tokenizer_config=json.dumps({"eos_token": "<|im_end|>"}).encode(),
)


async def test_a_lease_says_what_was_registered(stage: Stage, broker: Broker) -> None:
    await stage.registry.register(INFO)
    (found,) = await stage.registry.workers()
    assert 0 <= found.heartbeat_age_ms < 5000
    (score,) = await broker.call("ZMSCORE", broker.keys.workers, "w0")
    assert found.heartbeat_ms == int(float(score)) > 1_700_000_000_000
    assert replace(found, heartbeat_age_ms=0, heartbeat_ms=0) == INFO
    busier = replace(INFO, running=32, state=DRAINING)
    assert (await stage.registry.renew(busier)).held_lease
    (found,) = await stage.registry.workers()
    assert replace(found, heartbeat_age_ms=0, heartbeat_ms=0) == busier
    await stage.registry.register(replace(INFO, id="a"))
    assert [worker.id for worker in await stage.registry.workers()] == ["a", "w0"]
    assert 0 < await broker.call("PTTL", broker.keys.worker("w0")) <= 30_000


async def test_a_lease_lapses_unless_renewed(brief: Stage) -> None:
    await brief.registry.register(INFO)
    await brief.registry.register(replace(INFO, id="w1"))
    for _ in range(6):
        await asyncio.sleep(SHORT_TTL_MS / 4000)
        assert (await brief.registry.renew(INFO)).held_lease
    assert [worker.id for worker in await brief.registry.workers()] == ["w0"]


async def test_a_lapsed_lease_is_made_again(brief: Stage) -> None:
    await brief.registry.register(INFO)
    await brief.perish(INFO)
    assert (await brief.registry.renew(INFO)).held_lease
    assert [worker.id for worker in await brief.registry.workers()] == ["w0"]


async def test_a_flushed_lease_is_made_again(stage: Stage, broker: Broker) -> None:
    await stage.registry.register(INFO)
    await broker.call("DEL", broker.keys.worker("w0"), broker.keys.workers)
    assert (await stage.registry.renew(INFO)).held_lease
    assert [worker.id for worker in await stage.registry.workers()] == ["w0"]


async def test_a_restarted_worker_waits_for_the_lease_of_its_past_life(brief: Stage) -> None:
    await brief.registry.register(INFO)
    reborn = replace(INFO, incarnation=new_incarnation())
    started = time.monotonic()
    await brief.registry.register(reborn)
    assert SHORT_TTL_MS / 2000 < time.monotonic() - started < 5
    (found,) = await brief.registry.workers()
    assert found.incarnation == reborn.incarnation
    # The past life may only have been frozen. It does not come back.
    assert not (await brief.registry.renew(INFO)).held_lease
    await brief.registry.leave("w0", INFO.incarnation)
    (found,) = await brief.registry.workers()
    assert found.incarnation == reborn.incarnation


async def test_a_live_workers_id_is_refused(brief: Stage) -> None:
    await brief.registry.register(INFO)
    renewing = asyncio.create_task(brief.beat(INFO))
    started = time.monotonic()
    with pytest.raises(WorkerIdTaken, match=r"w0.*0123456789abcdef"):
        await brief.registry.register(replace(INFO, incarnation=new_incarnation()))
    # As soon as the holder has renewed, not after the whole TTL.
    assert time.monotonic() - started < 5
    renewing.cancel()
    (found,) = await brief.registry.workers()
    assert found.incarnation == INFO.incarnation


async def test_of_many_with_one_id_one_gets_the_lease(brief: Stage) -> None:
    lives = [replace(INFO, incarnation=new_incarnation()) for _ in range(8)]

    async def live(info: WorkerInfo) -> None:
        await brief.registry.register(info)
        await brief.beat(info)

    tasks = [asyncio.create_task(live(info)) for info in lives]

    async def settled() -> bool:
        return sum(task.done() for task in tasks) == len(lives) - 1

    await until(settled)
    done, alive = await asyncio.wait(tasks, timeout=0)
    assert len(alive) == 1
    assert {type(task.exception()) for task in done} == {WorkerIdTaken}
    for task in alive:
        task.cancel()


async def test_leaving_without_jobs_leaves_nothing(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.jobs.next_entries(stage.reader, worker.id, worker.incarnation, 1, 1)
    assert await broker.call("EXISTS", broker.keys.jobs("w0")) == 1
    await stage.registry.leave(worker.id, worker.incarnation)
    await stage.registry.leave(worker.id, worker.incarnation)
    assert await stage.registry.workers() == []
    for key in (broker.keys.worker("w0"), broker.keys.jobs("w0"), broker.keys.workers):
        assert await broker.call("EXISTS", key) == 0
    # The id is free at once.
    await stage.worker()


async def test_hostile_leases_are_left_out(stage: Stage, broker: Broker) -> None:
    await stage.registry.register(INFO)
    for number, field in enumerate(("running", "incarnation", "device")):
        info = replace(INFO, id=f"bad{number}")
        await stage.registry.register(info)
        await broker.call("HSET", broker.keys.worker(info.id), field, b"\xff\xfe")
    for number, rate in enumerate(("nan", "inf", "-1.0", "fast", "1e400")):
        await stage.registry.register(replace(INFO, id=f"odd{number}"))
        await broker.call("HSET", broker.keys.worker(f"odd{number}"), "prefill_tok_s", rate)
    await stage.registry.register(replace(INFO, id="partial"))
    await broker.call("HDEL", broker.keys.worker("partial"), "fingerprint")
    await broker.call("ZADD", broker.keys.workers, 1, "string", 1, b"\xff")
    await broker.call("SET", broker.keys.worker("string"), "x")
    assert [worker.id for worker in await stage.registry.workers()] == ["w0"]
    assert broker.malformed == 10
    await broker.call("DEL", broker.keys.worker("string"))


async def test_loads_are_those_of_the_incarnation(stage: Stage, broker: Broker) -> None:
    worker, idle = await stage.worker(), await stage.worker("w1")
    await stage.submit("r1", worker)
    await stage.submit("r2", worker, prefill=3)
    past = replace(worker, incarnation=new_incarnation())
    assert await stage.registry.loads([worker, idle]) == {"w0": Load(2, 20, 3, 2), "w1": Load(0, 0)}
    assert await stage.registry.loads([past]) == {"w0": Load(0, 0)}
    assert await stage.registry.loads([]) == {}
    key = broker.keys.load("w1", idle.incarnation)
    await broker.call("HSET", key, "jobs", "-3", "tokens", "many", "prefill", "1.5", "sequences", "x")
    assert await stage.registry.loads([idle]) == {"w1": Load(0, 0)}
    await broker.call("SET", key, "x")
    assert await stage.registry.loads([idle]) == {"w1": Load(0, 0)}
    await broker.call("DEL", key)


async def test_gateways(brief: Stage) -> None:
    assert await brief.registry.live_gateways([]) == set()
    await brief.registry.renew_gateway("g0")
    await brief.registry.renew_gateway("g1")
    await brief.registry.renew_gateway("g2")
    await brief.registry.leave_gateway("g2")
    assert await brief.registry.live_gateways(["g0", "g1", "g1", "g2", "g3"]) == {"g0", "g1"}
    for _ in range(6):
        await asyncio.sleep(SHORT_TTL_MS / 4000)
        await brief.registry.renew_gateway("g1")
    assert await brief.registry.live_gateways(["g0", "g1"]) == {"g1"}


async def test_a_models_card(stage: Stage, broker: Broker) -> None:
    assert await stage.registry.model("fp") is None
    await stage.registry.publish_model(CARD)
    assert await stage.registry.model("fp") == CARD
    assert await broker.call("MEMORY", "USAGE", broker.keys.model("fp")) < 2000
    changed = replace(CARD, vocab_size=49280)
    await stage.registry.publish_model(changed)
    assert await stage.registry.model("fp") == changed


async def test_a_card_is_extended_without_sending_it_again(broker: Broker) -> None:
    registry = Registry(broker, model_ttl_ms=300)
    await registry.publish_model(CARD)
    await broker.call("HSET", broker.keys.model("fp"), "mark", "1")
    for _ in range(6):
        await asyncio.sleep(0.1)
        await registry.publish_model(CARD)
    assert await broker.call("HGET", broker.keys.model("fp"), "mark") == b"1"

    async def gone() -> bool:
        return await registry.model("fp") is None

    await until(gone)


def test_a_tokenizers_digest_is_of_both_its_files_and_nothing_else() -> None:
    assert replace(CARD, fingerprint="gpu", vocab_size=1, eos_token_ids=()).tokenizer == CARD.tokenizer
    parts = [(b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d")]
    cards = [replace(CARD, tokenizer_json=first, tokenizer_config=second) for first, second in parts]
    assert len({card.tokenizer for card in cards}) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokenizer_json", b"\x80\x04pickle"),
        ("tokenizer_json", zlib.compress(b"another")),
        ("tokenizer_json", zlib.compress(CARD.tokenizer_json)[:-5]),
        ("tokenizer_json", zlib.compress(bytes(65 * 2**20))),
        ("vocab_size", b"many"),
        ("eos_token_ids", b'{"a": 1}'),
        ("eos_token_ids", b"["),
        ("digest", b""),
    ],
)
async def test_hostile_cards_are_ignored(stage: Stage, broker: Broker, field: str, value: bytes) -> None:
    await stage.registry.publish_model(CARD)
    await broker.call("HSET", broker.keys.model("fp"), field, value)
    assert await stage.registry.model("fp") is None
    assert broker.malformed == 1


@pytest.mark.parametrize("junk", [("SET", "junk"), ("RPUSH", "junk")])
async def test_what_stands_in_the_place_of_a_card_goes(stage: Stage, broker: Broker, junk: tuple[str, str]) -> None:
    command, value = junk
    await broker.call(command, broker.keys.model("fp"), value)
    await stage.registry.publish_model(CARD)
    assert await stage.registry.model("fp") == CARD
    assert 0 < await broker.call("PTTL", broker.keys.model("fp")) <= 60_000


async def test_a_look_whether_a_name_is_free_takes_nothing(stage: Stage, brief: Stage) -> None:
    await stage.registry.require_free("w0")
    assert await stage.registry.workers() == []
    await brief.registry.register(INFO)
    # It may lapse, as after a crash and a quick restart: then the name is free.
    await stage.registry.require_free("w0")
    await stage.registry.register(INFO)

    async def renew() -> None:
        while True:
            await asyncio.sleep(SHORT_TTL_MS / 4000)
            await stage.registry.renew(INFO)

    renewing = asyncio.create_task(renew())
    with pytest.raises(WorkerIdTaken) as taken:
        await stage.registry.require_free("w0")
    renewing.cancel()
    assert taken.value.holder == INFO.incarnation
