"""Pages in a folder that somebody else writes to or deletes from, or whose disk is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.page_dir import FILE, PageFolderError
from kvstore.page_store import Usage
from kvstore.page_tables import PRAGMAS, TABLES
from tests.integration.kvstore.test_page_dir import folder
from tests.integration.kvstore.test_page_store import SIZE, hashes, page, value

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "change",
    [
        *("value = 12345", "value = 'text'", "value = 0.5"),
        *("hash = 'text'", "hash = 7", "hash = x'00'"),
        *("size = 'text'", "size = -1000000000", f"size = {2**63 - 1}", "used = 'text'"),
    ],
)
async def test_rows_that_somebody_else_wrote_are_no_pages(tmp_path: Path, change: str) -> None:
    """Columns take values of any type. Such a page is a miss like any other that is none; sums are made without it."""
    store = folder(tmp_path, budget=3 * SIZE)
    assert await store.put("f", [page(1, 1), page(2)]) == [True, True]
    row = ("UPDATE pages SET " + change + " WHERE hash = ?", hashes(1))
    await store._run(lambda database: database.execute(*row).fetchall())
    assert await store.fetch("f", hashes(1)) in ([], [b""], [value(1)])
    assert {*await store.hottest("f", 9)} <= {*hashes(1, 2)}
    assert await store.put("f", [page(3)]) == [True]
    await store.drop("f", hashes(1))  # as who has read it does
    assert await store.tend() == Usage(2, 2 * SIZE)
    assert await store.fetch("f", hashes(2, 3)) == [value(2), value(3)]
    assert await store.put("f", [page(1)]) == [True]
    assert await store.fetch("f", hashes(1)) == [value(1)]
    await store.close()


async def test_a_page_that_another_process_drops_while_it_is_read_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder(tmp_path)
    await store.put("f", [page(1)])
    monkeypatch.setattr("kvstore.page_dir.row_of", lambda *_: 99)
    assert await store.fetch("f", hashes(1)) == []
    await store.close()


async def test_on_a_full_disk_what_was_used_least_recently_gives_way(tmp_path: Path) -> None:
    """The database may not grow any more. It is read on, and written again."""
    store = folder(tmp_path)
    await store.put("f", [page(number, 20 - number, size=100_000) for number in range(20)])
    opened = store._database
    ((size,),) = await store._run(lambda database: database.execute("PRAGMA page_count").fetchall())
    await store._run(lambda database: database.execute(f"PRAGMA max_page_count = {size}").fetchall())
    with pytest.raises(PageFolderError, match=r"full; .* dropped"):
        await store.put("f", [page(20, size=300_000)])
    assert await store.hottest("f", 99) == hashes(*range(19, 9, -1))
    assert await store.fetch("f", hashes(19)) == [value(19, 100_000)]
    assert await store.put("f", [page(20, size=300_000)]) == [True]
    assert store._database is opened
    # What is larger than the disk, whatever is dropped, ends with nothing.
    for match in ["dropped"] * 3 + ["begun anew"]:
        with pytest.raises(PageFolderError, match=match):
            await store.put("f", [page(21, size=4_000_000)])
    assert await store.put("f", [page(21, size=100_000)]) == [True]
    await store.close()


async def test_a_database_that_does_not_open_on_a_full_disk_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be all that fills the disk. One that exists may have as many pages as it has, a new one has 8."""
    store = folder(tmp_path)
    await store.put("f", [page(number, size=100_000) for number in range(9)])
    await store.close()
    monkeypatch.setattr("kvstore.page_dir.PRAGMAS", (*PRAGMAS, "max_page_count = 8"))
    monkeypatch.setattr("kvstore.page_dir.TABLES", TABLES + "CREATE TABLE IF NOT EXISTS more (id INTEGER);")
    store = folder(tmp_path)
    with pytest.raises(PageFolderError, match="full; they are begun anew"):
        await store.fetch("f", hashes(0))
    assert await store.put("f", [page(1)]) == [True]
    assert await store.fetch("f", hashes(1)) == [value(1)]
    await store.close()


@pytest.mark.parametrize("left", ["", "-wal", "-shm"], ids=["nothing", "log", "index"])
async def test_a_file_that_is_deleted_while_it_is_open_is_not_written_to_any_more(tmp_path: Path, left: str) -> None:
    """What is stored would be lost with the last process that has it open."""
    one, other = folder(tmp_path), folder(tmp_path)
    await one.put("f", [page(1)])
    assert await other.fetch("f", hashes(1)) == [value(1)]
    for suffix in {"", "-wal", "-shm"} - ({left} if left else set()):
        (tmp_path / (FILE + suffix)).unlink()
    assert await one.put("f", [page(2)]) == [True]
    assert await other.put("f", [page(3)]) == [True]
    await one.close()
    await other.close()
    again = folder(tmp_path)
    assert await again.fetch("f", hashes(2, 3)) == [value(2), value(3)]
    assert await again.fetch("f", hashes(1)) == []
    await again.close()
