"""API keys in a file: one JSON object, see ``kvstore.api_keys``. Written whole, so that who reads it sees it before a
change or after."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from filelock import FileLock

from kvstore.api_keys import book_of
from kvstore.errors import KeysDamaged, NoKeyFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.api_keys import KeyBook

LOCK_S: Final = 10.0
"""How long a change waits for another one."""


class KeyFile:
    """Keys in a file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self, known: str) -> tuple[str, KeyBook] | None:
        """As ``KeyStore.read``."""
        try:
            return await asyncio.to_thread(self._read, known)
        except FileNotFoundError:
            first = f"`octavo keys add --keys {self._path} --tenant NAME` makes the first"
            raise NoKeyFile(f"there is no file of API keys {self._path}: {first}") from None

    async def put(self, changes: Mapping[str, Mapping[str, Any] | None], known: str | None = None) -> bool:
        """As ``KeyStore.put``; makes the file, for its owner alone, where there is none (version: empty)."""
        return await asyncio.to_thread(self._put, changes, known)

    def _read(self, known: str) -> tuple[str, KeyBook] | None:
        with self._path.open("rb") as file:
            version = _version(os.fstat(file.fileno()))
            return None if version == known else (version, book_of(self._entries(file.read())))

    def _put(self, changes: Mapping[str, Mapping[str, Any] | None], known: str | None) -> bool:
        with FileLock(f"{self._path}.lock", timeout=LOCK_S):
            if known is not None and known != (_version(self._path.stat()) if self._path.exists() else ""):
                return False
            entries = self._entries(self._path.read_bytes()) if self._path.exists() else {}
            kept = {name: value for name, value in (entries | {**changes}).items() if value is not None}
            text = json.dumps(kept, indent=1, sort_keys=True) + "\n"
            descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            temporary = Path(name)
            try:
                with os.fdopen(descriptor, "w") as file:
                    self._like_before(descriptor)
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._path)
            except BaseException:
                temporary.unlink()
                raise
        return True

    def _like_before(self, descriptor: int) -> None:
        """Whoever could read the file can read the one that takes its place. A new one is for its owner alone."""
        if self._path.exists():
            before = self._path.stat()
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            with suppress(PermissionError):  # not ours to give away
                os.fchown(descriptor, before.st_uid, before.st_gid)

    def _entries(self, data: bytes) -> dict[str, Any]:
        try:
            entries = json.loads(data)
            if not isinstance(entries, dict):
                raise ValueError("it is no JSON object")
            book_of(entries)
        except ValueError as error:
            raise KeysDamaged(f"the API keys in {self._path} are damaged: {error}") from error
        return entries


def _version(found: os.stat_result) -> str:
    """What is replaced has another inode; what is written over, another time or size."""
    return f"{found.st_ino} {found.st_mtime_ns} {found.st_size}"
