"""Pages in an SQLite database: its tables, and what is asked of them. All of it raises sqlite3.Error."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from kvstore.page_store import RANK_MS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.block_hash import BlockHash
    from kvstore.page_store import PageRef

DROPPED_AT_ONCE: Final = 64
RELIEF_BYTES: Final = 256 << 20
"""Are dropped from a disk that is full, at most: a second's work."""
GIVEN_BACK_AT_ONCE: Final = 256
"""Pages of the database, which are moved for that and are in the log first."""
RANK_S: Final = RANK_MS / 1000
"""So much longer ago a page counts as used than the one before it."""


# Sizes of pages suit values of some hundred kilobytes; the log is cut back so that it does not double the disk's use.
# The file is not mapped: if somebody cut it short, reading it would kill the process.
PRAGMAS: Final = (
    *("page_size = 32768", "auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL"),
    *("wal_autocheckpoint = 512", "journal_size_limit = 67108864", "mmap_size = 0"),
)
TABLES: Final = """
CREATE TABLE IF NOT EXISTS pages (
  id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, hash BLOB NOT NULL, used REAL NOT NULL, size INTEGER NOT NULL,
  value BLOB NOT NULL, UNIQUE (fingerprint, hash)
);
CREATE INDEX IF NOT EXISTS by_use ON pages (used, size);
"""

# Columns take values of any type. Only names in an index are looked at, so that no page is read for it.
IS_HASH: Final = "typeof(hash) = 'blob' AND length(hash) = 32"
_ODD: Final = f"typeof(used) <> 'real' OR typeof(size) <> 'integer' OR size NOT BETWEEN 0 AND {1 << 40}"
"""Of rows that somebody else wrote, with which no sum can be made."""


class Room:
    """The budget, in one transaction: what all pages take is summed up once, and then carried along."""

    def __init__(self, database: sqlite3.Connection, budget: int) -> None:
        self._database = database
        self._budget = budget
        # TOTAL() does not overflow, as SUM() does.
        taken, odd = database.execute(f"SELECT TOTAL(size), COALESCE(SUM({_ODD}), 0) FROM pages").fetchone()
        if odd:
            database.execute(f"DELETE FROM pages WHERE {_ODD}")
            (taken,) = database.execute("SELECT TOTAL(size) FROM pages").fetchone()
        self.taken = int(taken)

    def make(self, size: int) -> bool:
        """Drops what was used least recently until there is room for so many bytes, and gives that away; False if there
        can't be."""
        if size > self._budget:
            return False
        while self.taken + size > self._budget:
            oldest = self._database.execute("SELECT id, size FROM pages ORDER BY used LIMIT ?", (DROPPED_AT_ONCE,))
            for row, its_size in oldest.fetchall():
                if self.taken + size <= self._budget:
                    break
                self._database.execute("DELETE FROM pages WHERE id = ?", (row,))
                self.taken -= its_size
        self.taken += size
        return True

    def drop(self, which: str, *given: object) -> None:
        """Those for which an SQL condition holds."""
        sizes = self._database.execute(f"DELETE FROM pages WHERE {which} RETURNING size", given).fetchall()
        self.taken -= sum(size for (size,) in sizes)


def relieved(database: sqlite3.Connection) -> bool:
    """Drops half of all pages, those used least recently, but no more than can be dropped at once, and gives their room
    on the disk back; False: there are none. That takes a little room itself: the log's."""
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with writing(database):
        taken = Room(database, 0).taken
        Room(database, max(taken // 2, taken - RELIEF_BYTES)).make(0)
    with suppress(sqlite3.Error):  # the next pages take what was dropped
        give_back(database)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return taken > 0


def give_back(database: sqlite3.Connection) -> None:
    """To the disk: what was dropped. In parts, as the log is as long as one of them."""
    free, before = _free(database), 0
    while free and free != before:
        database.executescript(
            f"PRAGMA incremental_vacuum({GIVEN_BACK_AT_ONCE})"
        )  # by execute() it is one step of many
        free, before = _free(database), free


def _free(database: sqlite3.Connection) -> int:
    (count,) = database.execute("PRAGMA freelist_count").fetchone()
    return int(count)


def those_there(
    database: sqlite3.Connection, fingerprint: str, asked: Sequence[BlockHash], oldest: float
) -> set[bytes]:
    """Which of these are there and were used since ``oldest`` (seconds since the epoch). Not for thousands at once."""
    marks = ",".join("?" * len(asked))
    rows = database.execute(
        f"SELECT hash FROM pages WHERE fingerprint = ? AND hash IN ({marks}) AND used >= ?",
        (fingerprint, *asked, oldest),
    )
    return {hash_ for (hash_,) in rows}


def row_of(database: sqlite3.Connection, fingerprint: str, hash_: BlockHash, oldest: float) -> int | None:
    """Where a page is; None: not there, or too old."""
    row = database.execute(
        "SELECT id FROM pages WHERE fingerprint = ? AND hash = ? AND used >= ?", (fingerprint, hash_, oldest)
    ).fetchone()
    return None if row is None else int(row[0])


def renewed(database: sqlite3.Connection, fingerprint: str, ref: PageRef, now: float, oldest: float) -> bool:
    """Counts a page as used now; whether it is there."""
    row = row_of(database, fingerprint, ref.hash, oldest)
    if row is not None:
        database.execute("UPDATE pages SET used = ? WHERE id = ?", (now - ref.rank * RANK_S, row))
    return row is not None


@contextmanager
def writing(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction of one writer; nothing of it stays if it fails."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):  # a full disk has rolled it back
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
