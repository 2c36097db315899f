"""What the gateway asks the page store: a real one, in a folder."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from gateway.pages import ALONE_S, AT_A_TIME, MOST_BLOCKS, MOST_QUESTIONS, SLOW_S, PlaceError, Stored, open_store
from gateway.prefixes import PromptHashes
from kvstore.errors import KvError
from kvstore.page_dir import DirPages
from kvstore.page_redis import RedisPages
from kvstore.page_store import PageLimits, PageRef, StoredPage
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
    trouble: str | None = None

    async def covered(self, fingerprint: str, hashes: Sequence[BlockHash]) -> int:
        self.asked += (len(hashes),)
        if self.trouble == "slow":
            await asyncio.Event().wait()
        if self.trouble == "error":
            raise KvError("damaged")
        return await super().covered(fingerprint, hashes)


@asynccontextmanager
async def storing(folder: Path, *blocks: int) -> AsyncIterator[tuple[Counting, PromptHashes]]:
    """A store that has these blocks of the prompt."""
    store = Counting(folder, PageLimits(1 << 20, 60.0))
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


@pytest.mark.parametrize(("trouble", "alone_s"), [("slow", SLOW_S), ("error", ALONE_S)])
async def test_a_store_in_trouble_is_left_alone_for_a_while(tmp_path: Path, trouble: str, alone_s: float) -> None:
    now = 100.0
    async with storing(tmp_path, 0, 1) as (store, hashes):
        stored = Stored(store, limit_s=0.01, clock=lambda: now)
        store.trouble = trouble
        for _ in range(3):
            assert not any((await stored.look([worker("w0")], hashes, {"w0": 0})).values())
        assert store.asked == (10,)
        store.trouble = None
        now += alone_s
        stored._limit_s = 10.0
        assert await stored.look([worker("w0")], hashes, {"w0": 0}) == {"w0": 2}


class OneAtATime:
    """A store that takes 10 ms for each question, which no other one shortens."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.under_way = self.most = 0

    async def covered(self, fingerprint: str, hashes: Sequence[BlockHash]) -> int:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            async with self.lock:
                await asyncio.sleep(0.01)
        finally:
            self.under_way -= 1
        return len(hashes)


async def test_a_crowd_does_not_make_the_store_slow() -> None:
    """What waits for its turn in the gateway does not count as the store's time."""
    store = OneAtATime()
    stored = Stored(store, limit_s=1.0)  # type: ignore[arg-type]
    hashes = PromptHashes(JOB)
    await hashes.prepare([worker("w0")])
    found = await asyncio.gather(*(stored.look([worker("w0")], hashes, {"w0": 0}) for _ in range(150)))
    assert found == [{"w0": 10}] * 150
    assert store.most == AT_A_TIME


async def test_of_many_questions_those_are_asked_whose_workers_hold_most(tmp_path: Path) -> None:
    async with storing(tmp_path, *range(10)) as (store, hashes):
        workers = [worker(f"w{index}") for index in range(6)]
        held = {f"w{index}": index for index in range(6)}
        found = await Stored(store).look(workers, hashes, held)
        assert found == {f"w{index}": 10 - index for index in range(2, 6)}
        assert len(found) == MOST_QUESTIONS


async def test_a_question_is_of_so_many_blocks_at_most(tmp_path: Path) -> None:
    async with storing(tmp_path, 0) as (store, _):
        hashes = PromptHashes(job_pb2.Job(prompt_token_ids=[1] * (MOST_BLOCKS + 2) * 16))
        await hashes.prepare([worker("w0")])
        await Stored(store).look([worker("w0")], hashes, {"w0": 1})
        assert store.asked == (MOST_BLOCKS,)


async def test_a_folder_is_only_read_and_what_is_too_old_is_not_there(tmp_path: Path) -> None:
    place, absent = tmp_path / "pages", open_store(f"dir:{tmp_path}/absent", "", "", "default")
    assert absent is not None
    async with storing(place, 0, 1) as (store, hashes):
        chain = hashes.of(worker("w0"))
        read = open_store(f"dir:{place}", "", "", "default", ttl_s=100.0)
        assert isinstance(read, DirPages)
        assert await read.covered("f", chain) == 2
        await store._run(lambda database: database.execute("UPDATE pages SET used = used - 101").fetchall())
        assert await read.covered("f", chain) == await absent.covered("f", chain) == 0
        with pytest.raises(KvError, match="readonly"):
            await read.put("f", [StoredPage(PageRef(chain[2], 0), b"page")])
    for each in (read, absent):
        await each.close()
    assert not (tmp_path / "absent").exists()


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
