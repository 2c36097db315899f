"""Pages in a folder on disk, shared by the processes of one machine: an SQLite database, in its own thread.

It is a cache: a database that is damaged, or too large for its disk, is thrown away and begun anew, by those who write
to it. Each schema has a file of its own, so that versions which share a folder leave each other's pages alone.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.block_hash import BlockHash
from kvstore.errors import KvError
from kvstore.page_store import PageLimits, PageRef, StoredPage, Usage
from kvstore.page_tables import (
    IS_HASH,
    PRAGMAS,
    RANK_S,
    TABLES,
    Room,
    give_back,
    relieved,
    renewed,
    row_of,
    those_there,
    writing,
)
from kvstore.page_thread import DiskThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMA: Final = 1
FILE: Final = f"pages-{SCHEMA}.sqlite3"
BUSY_S: Final = 2.0
"""How long one process waits for another one's write."""
CLOSE_S: Final = 3.0
"""How long what is under way may take when the database is closed, before it is interrupted; longer than BUSY_S."""
INTERRUPTED_S: Final = 0.5
"""And after that, before it is left to itself."""
ASKED_AT_ONCE: Final = 256
"""Hashes in one question, some hundred microseconds."""
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""The disk, not the budget: for a page, or for the index of the log."""


class PageFolderError(KvError):
    """The folder's database can't be used now."""


def require_folder(path: str) -> Path:
    """The folder of that name, which is made where it is not there. Raises PageFolderError where it can't be."""
    try:
        folder = Path(path).expanduser()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError) as error:  # the latter: nobody has that home
        why = getattr(error, "strerror", None) or error
        raise PageFolderError(f"--pages dir:{path}: that folder can't be made: {why}") from error
    return folder


class DirPages:
    """A `page_store.PageStore`. Opens its database when it is first used."""

    def __init__(self, folder: Path, limits: PageLimits, *, readonly: bool = False) -> None:
        """``readonly``: it makes and deletes no file; where there is none yet it finds nothing, and writing fails."""
        self._file = folder / FILE
        self._limits = limits
        self._readonly = readonly
        self._closed = False
        self._thread = DiskThread("pages")
        self._database: sqlite3.Connection | None = None
        self._inode: int | None = None
        """Of the file that was opened last; None: there was none."""

    async def covered(self, fingerprint: str, hashes: Sequence[BlockHash]) -> int:
        """How many of these are there, from the first one on."""

        def count(database: sqlite3.Connection) -> int:
            for start in range(0, len(hashes), ASKED_AT_ONCE):
                asked = hashes[start : start + ASKED_AT_ONCE]
                there = those_there(database, fingerprint, asked, self._oldest())
                for index, hash_ in enumerate(asked, start):
                    if hash_ not in there:
                        return index
            return len(hashes)

        return await self._run(count)

    async def fetch(self, fingerprint: str, hashes: Sequence[BlockHash]) -> list[bytes]:
        """The values of these, up to the first that isn't there."""

        def read(database: sqlite3.Connection) -> list[bytes]:
            values: list[bytes] = []
            for hash_ in hashes:
                row = row_of(database, fingerprint, hash_, self._oldest())
                if row is None:
                    break
                found = database.execute("SELECT value FROM pages WHERE id = ?", (row,)).fetchone()
                if found is None:  # another process has dropped it just now
                    break
                # What is no bytes was not written by us: no page, as whoever reads it will find.
                values.append(found[0] if isinstance(found[0], bytes) else b"")
            return values

        return await self._run(read)

    async def renew(self, fingerprint: str, refs: Sequence[PageRef]) -> list[bool]:
        """Counts these as used now. Which of them are there."""

        def renew(database: sqlite3.Connection) -> list[bool]:
            now = time.time()
            with writing(database):
                return [renewed(database, fingerprint, ref, now, self._oldest()) for ref in refs]

        return await self._run(renew) if refs else []

    async def put(self, fingerprint: str, pages: Sequence[StoredPage]) -> list[bool]:
        """Stores those that aren't there and renews the others."""

        def put(database: sqlite3.Connection) -> list[bool]:
            now = time.time()
            with writing(database):
                room = Room(database, self._limits.budget)
                return [self._put(database, room, fingerprint, page, now) for page in pages]

        return await self._run(put) if pages else []

    async def drop(self, fingerprint: str, hashes: Sequence[BlockHash]) -> None:
        """Deletes these."""

        def drop(database: sqlite3.Connection) -> None:
            with writing(database):
                rows = [(fingerprint, hash_) for hash_ in hashes]
                database.executemany("DELETE FROM pages WHERE fingerprint = ? AND hash = ?", rows)

        await self._run(drop)

    async def hottest(self, fingerprint: str, count: int) -> list[BlockHash]:
        """So many of those used most recently, at most."""

        def look(database: sqlite3.Connection) -> list[BlockHash]:
            rows = database.execute(
                f"SELECT hash FROM pages WHERE fingerprint = ? AND used >= ? AND {IS_HASH} ORDER BY used DESC LIMIT ?",
                (fingerprint, self._oldest(), count),
            )
            return [BlockHash(hash_) for (hash_,) in rows]

        return await self._run(look)

    async def tend(self) -> Usage:
        """Drops what is too old or over the budget, gives its room on the disk back, and tells what is left."""

        def tend(database: sqlite3.Connection) -> Usage:
            with writing(database):
                database.execute(f"DELETE FROM pages WHERE used < ? OR NOT ({IS_HASH})", (self._oldest(),))
                Room(database, self._limits.budget).make(0)
            give_back(database)
            pages, total = database.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM pages").fetchone()
            return Usage(pages, total)

        return await self._run(tend)

    async def close(self) -> None:
        """Closes the database; what is under way is finished, if that takes no longer than CLOSE_S. A disk that hangs
        holds up neither this nor the end of the process."""
        if self._closed:
            return
        self._closed = True
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        done, _ = await asyncio.wait([closing], timeout=CLOSE_S)
        if not done:
            self._interrupt()
            done, _ = await asyncio.wait([closing], timeout=INTERRUPTED_S)
        if not done:
            logger.warning("pages in %s: the database does not close, and is left to itself", self._file)

    def _interrupt(self) -> None:
        """From another thread than the database's."""
        database = self._database
        if database is not None:
            with suppress(sqlite3.Error):  # closed just now
                database.interrupt()

    async def _run(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """In the thread. Raises PageFolderError."""
        if self._closed:
            raise PageFolderError(f"pages in {self._file}: the folder was closed by this process")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, do)

    def _guarded(self, do: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return do(self._current())
        except (sqlite3.Error, OSError) as error:
            # Locked, not to be written to; the disk is full; or damaged.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
            if code in _FULL and not self._readonly:
                raise PageFolderError(f"pages in {self._file}: {error}; {self._make_room()}") from error
            if code != sqlite3.SQLITE_BUSY:
                self._close()
            if code & 0xFF not in _DAMAGED or self._readonly:
                raise PageFolderError(f"pages in {self._file}: {error}") from error
            self._remove()
            raise PageFolderError(f"pages in {self._file} were damaged and are begun anew: {error}") from error

    def _make_room(self) -> str:
        """On a full disk; tells what was done. Without room nothing can be dropped, as that is written, too; and a file
        that was closed may not even open again."""
        try:
            if self._database is not None and relieved(self._database):
                return "the pages used least recently were dropped"
        except sqlite3.Error:
            pass
        self._close()
        self._remove()
        return "they are begun anew"

    def _current(self) -> sqlite3.Connection:
        """The database in the file that is there now: another process may have thrown away the one that was opened."""
        inode = _inode(self._file)
        if self._database is None or inode != self._inode:
            self._close()
            self._database = self._opened_to_read() if self._readonly else self._opened()
        return self._database

    def _opened_to_read(self) -> sqlite3.Connection:
        self._inode = _inode(self._file)
        if self._inode is None:  # nobody has stored anything yet
            database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            database.executescript(TABLES)
            return database
        where = f"{self._file.absolute().as_uri()}?mode=ro"
        return sqlite3.connect(where, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)

    def _opened(self) -> sqlite3.Connection:
        # Pages have the tokens of prompts in them: they are nobody else's.
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file.touch(mode=0o600)
        self._inode = _inode(self._file)
        database = sqlite3.connect(self._file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in PRAGMAS:
                database.execute(f"PRAGMA {pragma}").fetchall()
            database.executescript(TABLES)
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
        if _inode(self._file) != self._inode:
            return
        for suffix in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)

    def _oldest(self) -> float:
        return time.time() - self._limits.ttl_s

    def _put(self, database: sqlite3.Connection, room: Room, fingerprint: str, page: StoredPage, now: float) -> bool:
        if renewed(database, fingerprint, page.ref, now, self._oldest()):
            return True
        room.drop("fingerprint = ? AND hash = ?", fingerprint, page.ref.hash)  # too old
        if not room.make(len(page.value)):
            return False
        database.execute(
            "INSERT INTO pages (fingerprint, hash, used, size, value) VALUES (?, ?, ?, ?, ?)",
            (fingerprint, page.ref.hash, now - page.ref.rank * RANK_S, len(page.value), page.value),
        )
        return True


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None
