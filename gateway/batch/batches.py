"""What others call: submit a batch, look at it, cancel it, read its results.

All of it is synchronous: files are written and synced. In an event loop: ``asyncio.to_thread``.

Each batch has a folder of its name in one that whoever submits shares with the workers of batches: ``input.jsonl`` as
it was submitted, and ``results.jsonl``.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gateway.batch import journal
from gateway.batch.files import INPUT, Files
from gateway.batch.lines import checked
from gateway.errors import AdmissionError
from kvstore import batch_queue
from kvstore.batches import BatchState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kvstore.batches import Batch, BatchStore, Settings

_OF: Final = "of-"
_ID: Final = re.compile(r"batch_[0-9a-f]{24}")


class BatchUnknown(Exception):  # noqa: N818 - it says what happened
    """There is no such batch, or it ended too long ago."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"there is no batch {batch_id[:64]!r}")


class BatchStateError(Exception):
    """A batch is in a state in which that can't be done."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where batches are: what is known of them, and their files."""

    store: BatchStore
    folder: Path

    def input(self, batch_id: str) -> Path:
        """The file as it was submitted."""
        return self.folder / batch_id / "input.jsonl"

    def results(self, batch_id: str) -> Path:
        """Lines that have ended."""
        return self.folder / batch_id / "results.jsonl"

    def files(self, tenant: str) -> Files:
        """Those that a tenant's clients have uploaded, and that its batches left. No tenant's name leads to another
        one's folder."""
        return Files(self.folder / "files" / f"{_OF}{tenant}")

    def all_files(self) -> list[Files]:
        """Those of all tenants."""
        return [Files(each) for each in sorted((self.folder / "files").glob(f"{_OF}*"))]


def submit(place: Place, lines: Iterable[bytes], settings: Settings) -> Batch:
    """Accepts a batch, whole, or refuses it: then nothing is left of it. `settings.total` is counted here.

    Raises FileError, with all that is wrong with the lines; OSError; BrokerError: the batch may have been accepted, if
    that came at the end.
    """
    batch_id = f"batch_{secrets.token_hex(12)}"
    new = place.folder / f".new-{batch_id}"
    new.mkdir(parents=True)
    try:
        total = 0
        with (new / "input.jsonl").open("wb") as file:
            for raw, _ in checked(lines):
                file.write(raw if raw.endswith(b"\n") else raw + b"\n")
                total += 1
            file.flush()
            os.fsync(file.fileno())
        journal.sync_folder(new)
        new.rename(place.folder / batch_id)
        journal.sync_folder(place.folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    place.store.create(batch_id, replace(settings, total=total))
    batch_queue.enqueue(place.store, batch_id)
    return status(place.store, batch_id)


def adopt(place: Place, settings: Settings) -> Batch:
    """Accepts a batch of an uploaded file, `settings.input_file`, unseen: whoever runs it checks it first, and ends it
    as failed where it is none. The file may be deleted then. It gets its job of rq from the workers of batches
    (``batch_queue.settle``): a gateway must not write any, as they could be for other code.

    Raises FileUnknown: the batch's tenant has no such file; AdmissionError: it is none for batches; OSError;
    BrokerError, as ``submit``.
    """
    files = place.files(settings.tenant)
    if (purpose := files.get(settings.input_file).purpose) != INPUT:
        raise AdmissionError("input_file_id", f"that of a file for {purpose!r}", f"must be of one for {INPUT!r}")
    content = files.content(settings.input_file)
    batch_id = f"batch_{secrets.token_hex(12)}"
    home = place.folder / batch_id
    home.mkdir()
    try:
        try:
            os.link(content, place.input(batch_id))
        except OSError:  # not every file system can
            shutil.copyfile(content, place.input(batch_id))
        journal.sync_folder(home)
        journal.sync_folder(place.folder)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    place.store.create(batch_id, settings)
    return status(place.store, batch_id)


def status(store: BatchStore, batch_id: str) -> Batch:
    """All that is known of a batch. Raises BatchUnknown, BrokerError."""
    batch = store.get(batch_id)
    if batch is None:
        raise BatchUnknown(batch_id)
    return batch


def every(store: BatchStore) -> list[Batch]:
    """Those that are known, the latest first. Raises BrokerError."""
    return store.all()


def cancel(store: BatchStore, batch_id: str) -> BatchState:
    """Ends a batch that nobody has begun, and tells whoever runs one to end it; what is done is kept. The state that it
    is in now. Raises BatchUnknown, BrokerError."""
    state = store.cancel(batch_id)
    if state is None:
        raise BatchUnknown(batch_id)
    return state


def resume(store: BatchStore, batch_id: str) -> BatchState:
    """Queues a batch again that failed or was cancelled: it goes on with the lines that have no result.

    Raises BatchUnknown, BatchStateError, BrokerError.
    """
    state = status(store, batch_id).state
    if state not in (BatchState.FAILED, BatchState.CANCELLED):
        raise BatchStateError(f"batch {batch_id} is {state}: only one that failed or was cancelled is resumed")
    batch_queue.drop(store, batch_id)
    store.reopen(batch_id)
    batch_queue.enqueue(store, batch_id)
    return status(store, batch_id).state


def results(place: Place, batch_id: str) -> Iterator[bytes]:
    """Lines of results so far, each with its end. Raises BatchUnknown, OSError."""
    if not _ID.fullmatch(batch_id) or not place.input(batch_id).exists():
        raise BatchUnknown(batch_id)
    return journal.results(place.results(batch_id))
