"""Pages in a folder: what becomes of the file."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import KvError
from kvstore.page_dir import ASKED_AT_ONCE, FILE, SCHEMA, DirPages, PageFolderError
from kvstore.page_store import PageLimits, PageRef, Usage
from tests.integration.kvstore.test_page_store import MUCH, SIZE, hashes, page, value

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


@pytest.mark.parametrize("damage", ["rubbish", "cut", "middle"])
async def test_a_damaged_database_is_begun_anew(tmp_path: Path, damage: str) -> None:
    store = folder(tmp_path)
    await store.put("f", [page(number, size=100_000) for number in range(9)])
    await store.close()
    file = tmp_path / FILE
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


async def test_a_file_that_is_cut_short_while_it_is_used_ends_nobody(tmp_path: Path) -> None:
    """A mapped one would end the process."""
    store, reader = folder(tmp_path), DirPages(tmp_path, PageLimits(MUCH, 60.0), readonly=True)
    await store.put("f", [page(number, size=100_000) for number in range(9)])
    for each in (store, reader):
        assert await each.fetch("f", hashes(0)) == [value(0, 100_000)]
        assert await each._run(lambda database: database.execute("PRAGMA mmap_size").fetchall()) in ([(0,)], [])
    await store._run(lambda database: database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
    os.truncate(tmp_path / FILE, 1 << 15)
    for each in (store, reader):
        for number in range(1, 9):
            with suppress(KvError):
                await each.fetch("f", hashes(number))
        await each.close()


async def test_who_only_reads_makes_no_file_and_deletes_none(tmp_path: Path) -> None:
    there = tmp_path / "pages"
    reader = DirPages(there, PageLimits(MUCH, 60.0), readonly=True)
    assert (await reader.covered("f", hashes(1)), await reader.fetch("f", hashes(1))) == (0, [])
    assert await reader.hottest("f", 9) == []
    assert not there.exists()
    store = folder(there)
    await store.put("f", [page(1)])
    # It follows the writer, also to another file.
    assert await reader.covered("f", hashes(1, 2)) == 1
    with pytest.raises(PageFolderError, match="readonly"):
        await reader.put("f", [page(2)])
    await store._run(lambda _: store._close())
    store._remove()
    await store.put("f", [page(2)])
    assert (await reader.covered("f", hashes(1)), await reader.covered("f", hashes(2))) == (0, 1)
    await store.close()
    await reader.close()
    for file in there.iterdir():  # the log has the pages, too
        file.unlink()
    (there / FILE).write_bytes(b"rubbish" * 999)
    reader = DirPages(there, PageLimits(MUCH, 60.0), readonly=True)
    with pytest.raises(PageFolderError, match="not a database"):
        await reader.covered("f", hashes(2))
    await reader.close()
    assert (there / FILE).read_bytes() == b"rubbish" * 999


async def test_versions_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder(tmp_path)
    await store.put("f", [page(1)])
    monkeypatch.setattr("kvstore.page_dir.FILE", "pages-2.sqlite3")
    later = folder(tmp_path)
    await later.put("f", [page(2)])
    assert (await store.covered("f", hashes(1)), await later.covered("f", hashes(1))) == (1, 0)
    for each in (store, later):
        await each.close()
    assert f"pages-{SCHEMA}.sqlite3" == FILE


async def test_what_all_pages_take_is_summed_up_once_for_those_put_together(tmp_path: Path) -> None:
    store, said = folder(tmp_path, budget=4 * SIZE), list[str]()
    await store._run(lambda database: database.set_trace_callback(said.append))
    assert await store.put("f", [page(number, 20 - number) for number in range(20)]) == [True] * 20
    assert len([each for each in said if "SUM(" in each]) == 1
    assert await store.hottest("f", 9) == hashes(19, 18, 17, 16)
    assert await store.tend() == Usage(4, 4 * SIZE)
    # Nor is one that is put anew because it was too old counted twice.
    await store._run(lambda database: database.execute("UPDATE pages SET used = 0").fetchall())
    assert await store.put("f", [page(number) for number in range(16, 20)]) == [True] * 4
    assert await store.tend() == Usage(4, 4 * SIZE)
    await store.close()


async def test_long_prefixes_are_asked_for_in_parts(tmp_path: Path) -> None:
    store = folder(tmp_path)
    whole = list(range(2 * ASKED_AT_ONCE + 10))
    await store.put("f", [page(1, size=1)._replace(ref=PageRef(each, 0)) for each in hashes(*whole)])
    for first in (0, ASKED_AT_ONCE - 1, ASKED_AT_ONCE, 2 * ASKED_AT_ONCE + 9):
        await store.drop("f", hashes(first))
        assert await store.covered("f", hashes(*whole)) == first
        await store.put("f", [page(1, size=1)._replace(ref=PageRef(hashes(first)[0], 0))])
    assert await store.covered("f", hashes(*whole)) == len(whole)
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
