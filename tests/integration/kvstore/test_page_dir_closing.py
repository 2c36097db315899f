"""A folder of pages whose disk hangs holds up nobody's end."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstore import page_dir
from kvstore.errors import KvError
from kvstore.page_dir import DirPages, PageFolderError
from kvstore.page_store import PageLimits
from tests.integration.kvstore.test_page_store import MUCH, hashes, page, value

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


def folder(path: Path) -> DirPages:
    return DirPages(path, PageLimits(MUCH, 60.0))


async def test_what_is_under_way_is_finished(tmp_path: Path) -> None:
    store = folder(tmp_path)
    putting = asyncio.create_task(store.put("f", [page(number, size=10_000) for number in range(100)]))
    await asyncio.sleep(0)
    await store.close()
    assert await putting == [True] * 100
    again = folder(tmp_path)
    assert await again.covered("f", hashes(*range(100))) == 100
    await again.close()


async def test_a_long_query_is_interrupted_and_the_database_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_dir, "CLOSE_S", 0.2)
    monkeypatch.setattr(page_dir, "INTERRUPTED_S", 30.0)
    store, begun = folder(tmp_path), threading.Event()
    await store.put("f", [page(1)])

    def endless(database: sqlite3.Connection) -> object:
        begun.set()
        return database.execute(ENDLESS).fetchall()

    asking = asyncio.create_task(store._run(endless))
    await asyncio.to_thread(begun.wait)
    async with asyncio.timeout(20):
        await store.close()
        with pytest.raises(PageFolderError, match="interrupted"):
            await asking
    assert store._database is None
    assert not caplog.records
    again = folder(tmp_path)
    assert await again.fetch("f", hashes(1)) == [value(1)]
    await again.close()


async def test_a_disk_that_hangs_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_dir, "CLOSE_S", 0.1)
    monkeypatch.setattr(page_dir, "INTERRUPTED_S", 0.1)
    store, begun, go_on = folder(tmp_path), threading.Event(), threading.Event()

    def hang(_: sqlite3.Connection) -> bool:
        begun.set()
        return go_on.wait()

    hanging = asyncio.create_task(store._run(hang))
    await asyncio.to_thread(begun.wait)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        await store.close()
    assert time.monotonic() - began < 5
    (told,) = [record.message for record in caplog.records]
    assert told.endswith("the database does not close, and is left to itself")
    with pytest.raises(KvError):
        await store.covered("f", hashes(1))
    go_on.set()
    assert await hanging is True
    while store._database is not None:  # noqa: ASYNC110 - what was left to itself closes all the same
        await asyncio.sleep(0.005)


def test_a_process_ends_while_its_disk_hangs(tmp_path: Path) -> None:
    program = f"""
import asyncio, pathlib, threading
from kvstore import page_dir
from kvstore.page_store import PageLimits
page_dir.CLOSE_S = page_dir.INTERRUPTED_S = 0.1

async def main():
    store = page_dir.DirPages(pathlib.Path({str(tmp_path)!r}), PageLimits(1 << 20, 60.0))
    hanging = threading.Event()
    asking = asyncio.create_task(store._run(lambda _: (hanging.set(), threading.Event().wait())))
    await asyncio.to_thread(hanging.wait)
    await store.close()
    asking.cancel()

asyncio.run(main())
print("ends")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ends\n"
