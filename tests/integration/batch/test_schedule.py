"""What workers of batches do on a schedule: warm up, and throw away what is too old."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.batch import batches
from gateway.batch.files import INPUT
from kvstore.batches import BatchState
from kvstore.block_hash import BlockHash
from kvstore.page_dir import DirPages
from kvstore.page_store import PageLimits, PageRef, StoredPage
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.batches import BatchStore
    from tests.integration.batch.conftest import World

OLD, YOUNG = BlockHash(b"o" * 32), BlockHash(b"y" * 32)


def test_a_chore_is_due_once_in_its_time_for_all_together(store: BatchStore) -> None:
    assert [store.due("c", 60), store.due("c", 60), store.due("d", 60)] == [True, False, True]
    assert 0 < store.redis.ttl(store.keys.chore("c")) <= 60
    store.redis.delete(store.keys.chore("c"), store.keys.chore("d"))
    store.close()


async def test_a_worker_warms_up_and_tidies(world: World, tmp_path: Path) -> None:
    new = world.place.files("acme").new()
    old = new.keep("old.jsonl", INPUT, 5)
    file = tmp_path / "warm.jsonl"
    file.write_text('"You are a geographer."\n{"prompt": "A book"}\n')

    async def done() -> bool:
        found = await asyncio.to_thread(batches.every, world.store)
        gone = old not in await asyncio.to_thread(world.place.files("acme").all)
        return gone and [(each.settings.name, each.state) for each in found] == [(file.name, BatchState.COMPLETED)]

    async with world.fleet(), world.batch_worker("b0", "--warm", str(file), "--tidy-every", "3600"):
        await until(done, within_s=30.0)
        (batch,) = await asyncio.to_thread(batches.every, world.store)
        assert (batch.progress.done, batch.progress.failed, batch.progress.completion_tokens) == (2, 0, 2)
    for chore in ("warm", "tidy"):
        await world.broker.call("DEL", world.store.keys.chore(chore))


async def test_pages_that_nobody_uses_are_thrown_away(world: World, tmp_path: Path) -> None:
    pages = DirPages(tmp_path / "pages", PageLimits(2**20, 1000.0))
    (tmp_path / "pages").mkdir()
    stored = [StoredPage(PageRef(hash_, rank), b"x") for hash_, rank in ((OLD, 10_000), (YOUNG, 0))]
    assert await pages.put("f", stored) == [True, True]
    await world.octavo("tidy", "--pages", f"dir:{tmp_path / 'pages'}", "--pages-ttl", "50")
    assert [await pages.covered("f", [hash_]) for hash_ in (OLD, YOUNG)] == [0, 1]
    await pages.close()
