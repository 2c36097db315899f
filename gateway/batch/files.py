"""Files that clients have uploaded, and those that batches leave behind. Synchronous, on disk alone: who shares the
folder has the same files.

Each is a folder of its own, which is made elsewhere and then moved: it is there whole, or not at all. Its name is
random, or follows from that of its batch, which is.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import IO, TYPE_CHECKING, Final

from gateway.batch.journal import results, sync_folder
from gateway.batch.outputs import told_raw

if TYPE_CHECKING:
    from pathlib import Path

INPUT: Final = "batch"
OUTPUT: Final = "batch_output"
MAX_NAME: Final = 255
"""Characters of a file's name."""
UNFINISHED_S: Final = 3600.0
"""After so long an upload that has not ended is one whose gateway has died."""
_ID: Final = re.compile(r"file-[0-9a-f]{24}")
_ABOUT: Final = "about.json"
_CONTENT: Final = "content"


class FileUnknown(Exception):  # noqa: N818 - it says what happened
    """There is no such file."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"there is no file {file_id[:64]!r}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file."""

    id: str
    filename: str
    """As its owner calls it."""
    purpose: str
    created_s: int
    """Unix time."""
    bytes: int = 0


class NewFile:
    """One that is being written. ``keep`` or ``drop`` it."""

    def __init__(self, folder: Path, file_id: str) -> None:
        """Raises OSError."""
        self.id = file_id
        self.size = 0
        self._home = folder / file_id
        self._new = folder / f".new-{secrets.token_hex(8)}"
        self._new.mkdir(parents=True)
        self._file: IO[bytes] = (self._new / _CONTENT).open("wb")

    def write(self, data: bytes | bytearray) -> None:
        """Goes on with it. Raises OSError."""
        self._file.write(data)
        self.size += len(data)

    def keep(self, filename: str, purpose: str, created_s: int) -> StoredFile:
        """From now on it is there, on disk, instead of what had its id. Raises OSError."""
        told = StoredFile(self.id, filename[:MAX_NAME], purpose, created_s)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with (self._new / _ABOUT).open("w") as about:
            json.dump(asdict(told), about)
            about.flush()
            os.fsync(about.fileno())
        sync_folder(self._new)
        if self._home.exists():
            shutil.rmtree(self._home)
        self._new.rename(self._home)
        sync_folder(self._home.parent)
        return replace(told, bytes=self.size)

    def drop(self) -> None:
        """Forgets it."""
        self._file.close()
        shutil.rmtree(self._new, ignore_errors=True)


class Files:
    """Those in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def new(self, file_id: str = "") -> NewFile:
        """One that is to be written. Raises OSError."""
        return NewFile(self._folder, file_id or f"file-{secrets.token_hex(12)}")

    def get(self, file_id: str) -> StoredFile:
        """Raises FileUnknown, OSError."""
        if not _ID.fullmatch(file_id):
            raise FileUnknown(file_id)
        home = self._folder / file_id
        try:
            about = json.loads((home / _ABOUT).read_text())
            return StoredFile(**{**about, "bytes": (home / _CONTENT).stat().st_size})
        except FileNotFoundError:
            raise FileUnknown(file_id) from None

    def content(self, file_id: str) -> Path:
        """Where it is. Raises FileUnknown, OSError."""
        return self._folder / self.get(file_id).id / _CONTENT

    def all(self) -> list[StoredFile]:
        """The latest first. Raises OSError."""
        found = []
        with suppress(FileNotFoundError):
            for each in self._folder.iterdir():
                with suppress(FileUnknown):  # none of ours, or just deleted
                    found.append(self.get(each.name))
        return sorted(found, key=lambda each: (each.created_s, each.id), reverse=True)

    def usage(self) -> tuple[int, int]:
        """How many there are, and their bytes: uploads that have not ended count. Raises OSError."""
        count = size = 0
        with suppress(FileNotFoundError):
            for each in self._folder.iterdir():
                count += 1
                with suppress(FileNotFoundError):  # just deleted, or just begun
                    size += (each / _CONTENT).stat().st_size
        return count, size

    def delete(self, file_id: str) -> None:
        """Raises FileUnknown, OSError."""
        shutil.rmtree(self._folder / self.get(file_id).id)

    def publish(self, batch_id: str, path: Path, now_s: int) -> None:
        """Makes files of a batch's results: of lines that have an answer, and of those that failed. After a kill it is
        called again, and makes the same. Raises OSError."""
        for failed in (False, True):
            new = self.new(output_id(batch_id, failed=failed))
            try:
                for raw in results(path):
                    if told_raw(raw).ok is not failed:
                        new.write(raw)
                if new.size:
                    new.keep(f"{batch_id}_{'error' if failed else 'output'}.jsonl", OUTPUT, now_s)
            finally:
                new.drop()

    def forget(self, older_s: float) -> int:
        """Deletes what is older (seconds), and uploads that nobody goes on with. How many files. Raises OSError."""
        gone = 0
        for each in self.all():
            if time.time() - each.created_s > older_s:
                with suppress(FileUnknown, FileNotFoundError):
                    self.delete(each.id)
                    gone += 1
        for left in self._folder.glob(".new-*"):
            with suppress(FileNotFoundError):
                if time.time() - (left / _CONTENT).stat().st_mtime > UNFINISHED_S:
                    shutil.rmtree(left, ignore_errors=True)
        return gone


def output_id(batch_id: str, *, failed: bool) -> str:
    """The id of the file with a batch's answers, or with its failures."""
    return f"file-{sha256(f'{batch_id} {failed}'.encode()).hexdigest()[:24]}"
