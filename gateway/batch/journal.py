"""A batch's file of results: one line for each line that has ended, in the order in which they did.

A line that was written survives the process; one that was synced, the machine. A file whose process was killed may end
in the middle of a line: what is from the first line on that is none is cut off, and runs again.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.batch.outputs import told

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


class Locked(Exception):  # noqa: N818 - it says what happened
    """Another process writes the file."""


@dataclass(slots=True)
class Tally:
    """What a file of results says so far."""

    ids: set[str] = field(default_factory=set)
    """Of lines that have ended."""
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    size: int = 0
    """Bytes of whole lines."""

    @property
    def done(self) -> int:
        """Lines with an answer."""
        return len(self.ids) - self.failed

    @property
    def counts(self) -> dict[str, int]:
        """As a batch's progress has them."""
        tokens = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {"done": self.done, "failed": self.failed, **tokens}

    def add(self, result: Any, size: int) -> None:
        """Takes in one more. Raises ValueError for what is none, and for a second one of a line."""
        found = told(result)
        if found.id in self.ids:
            raise ValueError(f"line {found.id!r} has two results")
        self.ids.add(found.id)
        self.failed += not found.ok
        self.prompt_tokens += found.prompt_tokens
        self.completion_tokens += found.completion_tokens
        self.size += size


def tally(lines: Iterable[bytes]) -> Tally:
    """What the lines of a file say, up to the first that is none. Pure."""
    found = Tally()
    for raw in lines:
        try:
            if not raw.endswith(b"\n"):
                break
            found.add(json.loads(raw), len(raw))
        except ValueError:
            break
    return found


class Journal:
    """The file, open for writing by this process alone. ``append`` is for one thread, ``sync`` for any."""

    def __init__(self, path: Path) -> None:
        """Makes it, or goes on with it. Raises Locked, OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._closing = threading.Lock()
        try:
            # Ends with the process, whatever ends it.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with path.open("rb") as lines:
                self.tally = tally(lines)
            self.cut = os.fstat(self._file).st_size - self.tally.size
            """Bytes that were no result."""
            os.ftruncate(self._file, self.tally.size)
            os.lseek(self._file, 0, os.SEEK_END)
            sync_folder(path.parent)
        except BlockingIOError:
            os.close(self._file)
            raise Locked(f"another process writes {path}") from None
        except BaseException:
            os.close(self._file)
            raise

    def append(self, result: dict[str, Any]) -> None:
        """One more result. Raises OSError; then it is not there. ValueError: that line has one."""
        if (found := told(result)).id in self.tally.ids:
            raise ValueError(f"line {found.id!r} has two results")
        raw = json.dumps(result, ensure_ascii=False).encode() + b"\n"
        before = self.tally.size
        try:
            written = 0
            while written < len(raw):
                written += os.write(self._file, raw[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, before)
                os.lseek(self._file, before, os.SEEK_SET)
            raise
        self.tally.add(result, len(raw))

    def sync(self) -> None:
        """What was appended before is on disk. Raises OSError."""
        with self._closing:
            if self._file >= 0:
                os.fsync(self._file)

    def close(self) -> None:
        """Syncs, and lets others write."""
        try:
            self.sync()
        finally:
            with self._closing:
                file, self._file = self._file, -1
                if file >= 0:
                    os.close(file)


def results(path: Path) -> Iterator[bytes]:
    """The whole lines of a file of results, as they are: one that is being written is left out. None, where there is no
    file yet."""
    with suppress(FileNotFoundError), path.open("rb") as lines:
        for raw in lines:
            if raw.endswith(b"\n"):
                yield raw


def sync_folder(folder: Path) -> None:
    """What was made and renamed in it is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
