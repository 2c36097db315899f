"""Pages in a folder: what becomes of the file."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import KvError
from kvstore.page_dir import FILE, DirPages, PageFolderError
from kvstore.page_store import PageLimits
from tests.integration.kvstore.test_page_store import MUCH, hashes, page, value

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.page_store import PageStore


def folder(path: Path, budget: int = MUCH) -> DirPages:
    return DirPages(path, PageLimits(budget, 60.0))


async def test_a_folder_outlives_its_process(tmp_path: Path) -> None:
    one = folder(tmp_path)
    await one.put("f", [page(1)])
    await one.close()
    again = folder(tmp_path)
    assert await again.fetch("f", hashes(1)) == [value(1)]
    await again.close()
    assert os.listdir(tmp_path) == [FILE]  # noqa: PTH208 - in a coroutine the other is forbidden


@pytest.mark.parametrize("damage", ["rubbish", "cut", "version", "middle"])
async def test_a_damaged_database_is_begun_anew(tmp_path: Path, damage: str) -> None:
    store = folder(tmp_path)
    await store.put("f", [page(number, size=100_000) for number in range(9)])
    await store.close()
    file = tmp_path / FILE
    if damage == "version":
        with closing(sqlite3.connect(file)) as database:
            database.execute("PRAGMA user_version = 9")
    else:
        whole = file.read_bytes()
        changed = {
            "rubbish": b"rubbish" * 999,
            "cut": whole[: len(whole) // 2],
            "middle": whole[:40_000] + b"\xff" * 200_000 + whole[240_000:],
        }
        file.write_bytes(changed[damage])
    store = folder(tmp_path)
    failures = 0
    for number in range(9):
        try:
            await store.fetch("f", hashes(number))  # what it gives is looked at by whoever asked
        except PageFolderError:
            failures += 1
    assert failures <= 2
    async with asyncio.timeout(10):
        while not await stored(store):
            failures += 1
    assert failures <= 3
    assert await store.fetch("f", hashes(50)) == [value(50)]
    await store.close()


async def stored(store: PageStore) -> bool:
    try:
        return await store.put("f", [page(50)]) == [True]
    except KvError:
        return False


async def test_a_folder_that_can_not_be_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = folder(tmp_path / "file")
    with pytest.raises(PageFolderError):
        await store.put("f", [page(1)])
    await store.close()


async def test_a_writer_that_does_not_end_is_not_waited_for_for_long(tmp_path: Path) -> None:
    store = folder(tmp_path)
    await store.put("f", [page(1)])
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(10):
            with pytest.raises(PageFolderError, match="locked"):
                await store.put("f", [page(2)])
        assert await store.fetch("f", hashes(1)) == [value(1)]
        other.execute("ROLLBACK")
    assert await store.put("f", [page(2)]) == [True]
    await store.close()


async def test_the_file_stays_near_its_budget_and_shrinks_with_it(tmp_path: Path) -> None:
    store = folder(tmp_path, budget=4 << 20)
    for number in range(40):
        await store.put("f", [page(number, size=1 << 20)])
    await store.close()
    size = (tmp_path / FILE).stat().st_size
    assert 4 << 20 < size < 7 << 20
    small = folder(tmp_path, budget=1 << 20)
    await small.tend()
    await small.close()
    assert (tmp_path / FILE).stat().st_size < 2 << 20


async def test_who_finds_the_damage_late_leaves_the_new_database_alone(tmp_path: Path) -> None:
    one, other = folder(tmp_path), folder(tmp_path)
    for store in (one, other):
        await store.put("f", [page(1)])
    assert one._database is not None
    assert other._database is not None
    await one._run(lambda _: one._close())
    one._remove()  # as after damage
    await one.put("f", [page(2)])
    other._remove()
    again = folder(tmp_path)
    assert await again.covered("f", hashes(2)) == 1
    for store in (one, other, again):
        await store.close()


async def test_pages_are_nobody_elses(tmp_path: Path) -> None:
    """Prompts can be read from them."""
    store = folder(tmp_path / "new" / "pages")
    await store.put("f", [page(1)])
    for path, mode in ((tmp_path / "new" / "pages", 0o700), (tmp_path / "new" / "pages" / FILE, 0o600)):
        assert os.stat(path).st_mode & 0o777 == mode  # noqa: PTH116 - in a coroutine the other is forbidden
    await store.close()
