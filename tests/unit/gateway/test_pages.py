"""What the gateway asks the page store: a real one, in a folder."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from gateway.pages import ALONE_S, PlaceError, Stored, open_store
from gateway.prefixes import PromptHashes
from kvstore.page_dir import DirPages
from kvstore.page_redis import RedisPages
from kvstore.page_store import PageRef, StoredPage
from kvstore.registry import WorkerInfo
from octavo.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from kvstore.block_hash import BlockHash

JOB = job_pb2.Job(prompt_token_ids=range(170))
"""Ten full blocks, and a part of one."""


def worker(name: str, fetch_tok_s: float = 5000.0, **fields: int) -> WorkerInfo:
    return WorkerInfo(name, f"{name}-1", "m", "f", prefill_tok_s=1000.0, fetch_tok_s=fetch_tok_s, **fields)


class Counting(DirPages):
    """Notes how many hashes it is asked for each time."""

    asked: tuple[int, ...] = ()
    broken = False

    async def covered(self, fingerprint: str, hashes: Sequence[BlockHash]) -> int:
        self.asked += (len(hashes),)
        if self.broken:
            await asyncio.Event().wait()
        return await super().covered(fingerprint, hashes)


@asynccontextmanager
async def storing(folder: Path, *blocks: int) -> AsyncIterator[tuple[Counting, PromptHashes]]:
    """A store that has these blocks of the prompt."""
    made = open_store(f"dir:{folder}", "", "", "default")
    assert isinstance(made, DirPages)
    store = Counting(folder, made._limits)
    await made.close()
    hashes = PromptHashes(JOB)
    await hashes.prepare([worker("w0")])
    chain = hashes.of(worker("w0"))
    await store.put("f", [StoredPage(PageRef(chain[block], block), b"page") for block in blocks])
    try:
        yield store, hashes
    finally:
        await store.close()


async def test_what_follows_on_each_workers_part_is_told(tmp_path: Path) -> None:
    async with storing(tmp_path, 3, 4, 5, 7) as (store, hashes):
        workers = [worker(f"w{index}") for index in range(5)]
        held = {"w0": 0, "w1": 3, "w2": 5, "w3": 3, "w4": 10}
        assert await Stored(store).look(workers, hashes, held) == {"w0": 0, "w1": 3, "w2": 1, "w3": 3}
        assert sorted(store.asked) == [5, 7, 10]


async def test_nobody_asks_for_who_would_not_fetch(tmp_path: Path) -> None:
    async with storing(tmp_path, 0, 1) as (store, hashes):
        workers = [worker("w0", 0.0), worker("w1", 900.0)]
        assert await Stored(store).look(workers, hashes, {"w0": 0, "w1": 0}) == {}
        assert store.asked == ()
        unmeasured = WorkerInfo("w2", "i", "m", "f", fetch_tok_s=5000.0)
        assert await Stored(store).look([unmeasured], hashes, {"w2": 0}) == {}


async def test_a_store_that_does_not_answer_is_left_alone_for_a_while(tmp_path: Path) -> None:
    now = 100.0
    async with storing(tmp_path, 0, 1) as (store, hashes):
        stored = Stored(store, limit_s=0.01, clock=lambda: now)
        store.broken = True
        for _ in range(3):
            assert await stored.look([worker("w0")], hashes, {"w0": 0}) == {}
        assert store.asked == (10,)
        store.broken = False
        now += ALONE_S
        stored._limit_s = 10.0
        assert await stored.look([worker("w0")], hashes, {"w0": 0}) == {"w0": 2}


async def test_where_pages_are(tmp_path: Path) -> None:
    assert open_store("none", "", "redis://broker", "n") is None
    for settings in (("redis", "", "redis://broker", "n"), ("none", "redis://pages", "redis://broker", "n")):
        store = open_store(*settings)
        assert isinstance(store, RedisPages)
        await store.close()


@pytest.mark.parametrize("pages", ["disk", "dir:", "dir"])
def test_what_is_no_place_is_refused(pages: str) -> None:
    with pytest.raises(PlaceError, match=f"--pages {pages} is not none, redis or dir:PATH"):
        open_store(pages, "", "redis://broker", "n")


def test_pages_are_in_one_place() -> None:
    with pytest.raises(PlaceError, match="can't be both in dir:x and in a server"):
        open_store("dir:x", "redis://pages", "redis://broker", "n")
