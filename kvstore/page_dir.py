"""Pages in a folder on disk, shared by the processes of one machine: an SQLite database, in its own thread.

It is a cache: a database that is damaged is thrown away and begun anew.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.block_hash import BlockHash
from kvstore.errors import KvError
from kvstore.page_store import RANK_MS, PageLimits, PageRef, StoredPage, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

FILE: Final = "pages.sqlite3"
SCHEMA: Final = 1
BUSY_S: Final = 2.0
"""How long one process waits for another one's write."""
DROPPED_AT_ONCE: Final = 64
RANK_S: Final = RANK_MS / 1000
"""So much longer ago a page counts as used than the one before it."""

# Sizes of pages suit values of some hundred kilobytes; the log is cut back so that it does not double the disk's use.
_PRAGMAS: Final = (
    *("page_size = 32768", "auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL"),
    *("wal_autocheckpoint = 512", "journal_size_limit = 67108864", "mmap_size = 1073741824"),
)
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS pages (
  id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, hash BLOB NOT NULL, used REAL NOT NULL, size INTEGER NOT NULL,
  value BLOB NOT NULL, UNIQUE (fingerprint, hash)
);
CREATE INDEX IF NOT EXISTS by_use ON pages (used, size);
"""


class PageFolderError(KvError):
    """The folder's database can't be used now."""


class DirPages:
    """A `page_store.PageStore`. Opens its database when it is first used."""

    def __init__(self, folder: Path, limits: PageLimits) -> None:
        self._file = folder / FILE
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pages")
        self._database: sqlite3.Connection | None = None
        self._inode = 0
        """Of the file that was opened last."""

    async def covered(self, fingerprint: str, hashes: Sequence[BlockHash]) -> int:
        """How many of these are there, from the first one on."""

        def count(database: sqlite3.Connection) -> int:
            for index, hash_ in enumerate(hashes):
                if _found(database, fingerprint, hash_, self._oldest()) is None:
                    return index
            return len(hashes)

        return await self._run(count)

    async def fetch(self, fingerprint: str, hashes: Sequence[BlockHash]) -> list[bytes]:
        """The values of these, up to the first that isn't there."""

        def read(database: sqlite3.Connection) -> list[bytes]:
            values: list[bytes] = []
            for hash_ in hashes:
                row = _found(database, fingerprint, hash_, self._oldest())
                if row is None:
                    break
                (value,) = database.execute("SELECT value FROM pages WHERE id = ?", (row,)).fetchone()
                values.append(value)
            return values

        return await self._run(read)

    async def renew(self, fingerprint: str, refs: Sequence[PageRef]) -> list[bool]:
        """Counts these as used now. Which of them are there."""

        def renew(database: sqlite3.Connection) -> list[bool]:
            now = time.time()
            with _writing(database):
                return [_renewed(database, fingerprint, ref, now, self._oldest()) for ref in refs]

        return await self._run(renew) if refs else []

    async def put(self, fingerprint: str, pages: Sequence[StoredPage]) -> list[bool]:
        """Stores those that aren't there and renews the others."""

        def put(database: sqlite3.Connection) -> list[bool]:
            now = time.time()
            with _writing(database):
                return [self._put(database, fingerprint, page, now) for page in pages]

        return await self._run(put) if pages else []

    async def drop(self, fingerprint: str, hashes: Sequence[BlockHash]) -> None:
        """Deletes these."""

        def drop(database: sqlite3.Connection) -> None:
            with _writing(database):
                rows = [(fingerprint, hash_) for hash_ in hashes]
                database.executemany("DELETE FROM pages WHERE fingerprint = ? AND hash = ?", rows)

        await self._run(drop)

    async def hottest(self, fingerprint: str, count: int) -> list[BlockHash]:
        """So many of those used most recently, at most."""

        def look(database: sqlite3.Connection) -> list[BlockHash]:
            rows = database.execute(
                "SELECT hash FROM pages WHERE fingerprint = ? AND used >= ? ORDER BY used DESC LIMIT ?",
                (fingerprint, self._oldest(), count),
            )
            return [BlockHash(hash_) for (hash_,) in rows]

        return await self._run(look)

    async def tend(self) -> Usage:
        """Drops what is too old or over the budget, gives its room on the disk back, and tells what is left."""

        def tend(database: sqlite3.Connection) -> Usage:
            with _writing(database):
                database.execute("DELETE FROM pages WHERE used < ?", (self._oldest(),))
                self._make_room(database, 0)
            database.executescript("PRAGMA incremental_vacuum")  # by execute() it would be one step of many
            pages, total = database.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM pages").fetchone()
            return Usage(pages, total)

        return await self._run(tend)

    async def close(self) -> None:
        """Closes the database; what is under way is finished."""
        with suppress(sqlite3.Error):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """In the thread. Raises PageFolderError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, do)

    def _guarded(self, do: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._database is None:
                self._database = self._opened()
            return do(self._database)
        except (sqlite3.OperationalError, OSError) as error:  # locked, full, not to be written to
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                self._close()
            raise PageFolderError(f"pages in {self._file}: {error}") from error
        except sqlite3.DatabaseError as error:
            self._close()
            self._remove()
            raise PageFolderError(f"pages in {self._file} were damaged and are begun anew: {error}") from error

    def _opened(self) -> sqlite3.Connection:
        # Pages have the tokens of prompts in them: they are nobody else's.
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file.touch(mode=0o600)
        self._inode = self._file.stat().st_ino
        database = sqlite3.connect(self._file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in _PRAGMAS:
                database.execute(f"PRAGMA {pragma}").fetchall()
            ((version,),) = database.execute("PRAGMA user_version").fetchall()
            if version not in (0, SCHEMA):
                raise sqlite3.DatabaseError(f"version {version}, not {SCHEMA}")
            database.executescript(_TABLES)
            if not version:
                database.execute(f"PRAGMA user_version = {SCHEMA}")
        except BaseException:
            database.close()
            raise
        return database

    def _close(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _remove(self) -> None:
        """Unless another process has done so already: what is there now is sound."""
        with suppress(FileNotFoundError):
            if self._file.stat().st_ino != self._inode:
                return
        for suffix in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)

    def _oldest(self) -> float:
        return time.time() - self._limits.ttl_s

    def _put(self, database: sqlite3.Connection, fingerprint: str, page: StoredPage, now: float) -> bool:
        size = len(page.value)
        if _renewed(database, fingerprint, page.ref, now, self._oldest()):
            return True
        if not self._make_room(database, size):
            return False
        database.execute(
            "INSERT OR REPLACE INTO pages (fingerprint, hash, used, size, value) VALUES (?, ?, ?, ?, ?)",
            (fingerprint, page.ref.hash, now - page.ref.rank * RANK_S, size, page.value),
        )
        return True

    def _make_room(self, database: sqlite3.Connection, size: int) -> bool:
        """Drops what was used least recently until there is room for so many bytes; False if there can't be."""
        if size > self._limits.budget:
            return False
        (total,) = database.execute("SELECT COALESCE(SUM(size), 0) FROM pages").fetchone()
        while total + size > self._limits.budget:
            rows = database.execute("SELECT id, size FROM pages ORDER BY used LIMIT ?", (DROPPED_AT_ONCE,)).fetchall()
            for row, its_size in rows:
                if total + size <= self._limits.budget:
                    break
                database.execute("DELETE FROM pages WHERE id = ?", (row,))
                total -= its_size
        return True


def _found(database: sqlite3.Connection, fingerprint: str, hash_: BlockHash, oldest: float) -> int | None:
    row = database.execute(
        "SELECT id FROM pages WHERE fingerprint = ? AND hash = ? AND used >= ?", (fingerprint, hash_, oldest)
    ).fetchone()
    return None if row is None else int(row[0])


def _renewed(database: sqlite3.Connection, fingerprint: str, ref: PageRef, now: float, oldest: float) -> bool:
    row = _found(database, fingerprint, ref.hash, oldest)
    if row is not None:
        database.execute("UPDATE pages SET used = ? WHERE id = ?", (now - ref.rank * RANK_S, row))
    return row is not None


@contextmanager
def _writing(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction of one writer; nothing of it stays if it fails."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):  # a full disk has rolled it back
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
