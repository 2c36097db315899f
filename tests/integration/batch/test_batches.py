"""Batches through rq, a gateway and a worker: what comes of every line, however they end."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from rq.job import Job
from rq.serializers import JSONSerializer

from gateway.batch import batches
from kvstore.batches import BatchState
from tests.integration.batch.conftest import short
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.batch.conftest import World

SLOW = "simulated:1000000,20"
"""Twenty milliseconds for a token."""


async def test_each_line_has_its_result_though_there_is_room_for_two_at_once(world: World, tmp_path: Path) -> None:
    completion = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "A book", "max_tokens": 3}}
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"custom_id": "h", "url": "/v1/chat/completions", "body": {"messages": messages, "max_tokens": 3}}
    lines = [
        short(1),
        completion,
        chat,
        short(2, 10_000),
        short(3, model="none"),
        *(short(each) for each in range(4, 8)),
    ]
    file, out = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    async with world.fleet(max_streams=2), world.batch_worker():
        told = json.loads(await world.octavo("submit", str(file), "--out", str(out), "--json", "--in-flight", "9"))
        await until(world.workers_are_idle, within_s=5.0)
        assert len((await world.octavo("workers", "--here")).splitlines()) == 2
        job = await asyncio.to_thread(Job.fetch, told["id"], connection=world.store.redis, serializer=JSONSerializer)
    assert (told["state"], told["name"], told["total"], told["done"], told["failed"]) == (
        "completed",
        file.name,
        9,
        7,
        2,
    )
    results = [json.loads(each) for each in out.read_text().splitlines()]
    found = {each.get("custom_id", each["id"]): each for each in results}
    assert len(found) == len(results) == 9
    assert len(found["l1"]["token_ids"]) == 4
    assert found["l1"]["request_id"] == f"{told['id']}.1"
    bodies = {each: found[each]["response"]["body"] for each in "ch"}
    assert bodies["c"]["object"] == "text_completion"
    assert bodies["h"]["choices"][0]["message"]["role"] == "assistant"
    assert found["l2"]["error"]["code"] == "context_length_exceeded"
    assert found["l3"]["error"]["code"] == "model_not_found"
    whole = [bodies["c"], bodies["h"], *(found[f"l{each}"] for each in (1, 4, 5, 6, 7))]
    assert told["completion_tokens"] == sum(each["usage"]["completion_tokens"] for each in whole)
    assert (job.meta["done"], job.meta["failed"], job.get_status()) == (7, 2, "finished")
    assert job.data.startswith(b'["gateway.batch.job.run", null, ["batch_')
    assert (await world.octavo("results", told["id"])).splitlines() == out.read_text().splitlines()
    assert [each["id"] for each in json.loads(await world.octavo("list", "--json"))] == [told["id"]]
    assert json.loads(await world.octavo("status", "--json")) == []
    assert await world.octavo("status") == "Every batch has ended.\n"
    assert told["id"] in await world.octavo("status", told["id"])


@pytest.mark.timeout(120)
async def test_workers_that_stop_and_are_killed_lose_and_double_nothing(world: World) -> None:
    async with world.fleet(SLOW):
        batch_id = await world.submit(*(short(number, 5) for number in range(96)), in_flight=8)
        async with world.batch_worker("b0") as first:
            await world.until(batch_id, lambda batch: batch.progress.done >= 8)
            assert await first.stop(20.0)
            assert first.returncode == 0
        left = await world.status(batch_id)
        assert left.state is BatchState.RUNNING
        assert left.progress.done < 88
        async with world.batch_worker("b1") as second:
            await world.until(batch_id, lambda batch: batch.progress.done > left.progress.done)
            running = psutil.Process(second.pid).children(recursive=True)
            assert running
            second.signal(signal.SIGKILL)
            await second.wait()
            _, alive = await asyncio.to_thread(psutil.wait_procs, running, timeout=10.0)
            assert not alive, "what it ran outlives it"
            with world.place.results(batch_id).open("ab") as file:
                file.write(b'{"id": "l95", "te')  # as if it had been writing
        assert (await world.status(batch_id)).progress.done < 96
        async with world.batch_worker("b2"):
            batch = await world.ended(batch_id)
    assert (batch.state, batch.progress.done, batch.progress.failed) == (BatchState.COMPLETED, 96, 0)
    found = world.results(batch_id)
    assert sorted(each["id"] for each in found) == sorted(f"l{number}" for number in range(96))
    # Those that ran when their worker went were found again.
    assert (await world.ledger())["accepted"] == 96


async def test_cancel_ends_what_runs_and_keeps_what_is_done_and_resume_does_the_rest(world: World) -> None:
    never_begun = await world.submit(short(1))
    assert await asyncio.to_thread(batches.cancel, world.store, never_begun) is BatchState.CANCELLED
    async with world.fleet(SLOW), world.batch_worker():
        batch_id = await world.submit(*(short(number, 2) for number in range(7)), short(99, 150), in_flight=8)
        await world.until(batch_id, lambda batch: batch.progress.done == 7)
        with pytest.raises(batches.BatchStateError):
            await asyncio.to_thread(batches.resume, world.store, batch_id)
        assert await asyncio.to_thread(batches.cancel, world.store, batch_id) is BatchState.CANCELLING
        batch = await world.ended(batch_id)
        assert (batch.state, batch.progress.done, len(world.results(batch_id))) == (BatchState.CANCELLED, 7, 7)
        assert await world.ledger() == {"accepted": 8, "finished": 7, "cancelled": 1}
        await asyncio.to_thread(batches.resume, world.store, batch_id)
        batch = await world.ended(batch_id)
    assert (batch.state, batch.progress.done, batch.progress.failed) == (BatchState.COMPLETED, 8, 0)
    assert len(world.results(batch_id)) == 8
    assert world.results(never_begun) == []
