"""Where files and batches are, for the HTTP API: a folder, and what Redis knows. Both are waited for by threads."""

from __future__ import annotations

import asyncio
import errno
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from gateway.batch.batches import BatchUnknown, Place
from gateway.batch.files import FileUnknown
from gateway.http.problems import Failed, Problem
from kvstore.batches import BatchStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    T = TypeVar("T")

THREADS: Final = 4
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class Desk:
    """Of one fleet. ``close`` it at the end."""

    def __init__(self, redis: str, namespace: str, folder: Path) -> None:
        """Makes the folder. Raises OSError, BrokerUrl."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._store = BatchStore(redis, namespace)
        self.place = Place(self._store, folder)
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="http-files")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives. Raises Failed for what is not there, and for a full disk; BrokerError; other OSError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except (FileUnknown, BatchUnknown) as error:
            raise Failed(Problem(404, str(error), code="not_found")) from error
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            message = "there is no room for more files on this server; delete some that are no longer needed"
            raise Failed(Problem(507, message, "server_error", code="no_room")) from error

    async def close(self) -> None:
        """Waits for what runs; drops what has not begun."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
        await asyncio.to_thread(self._store.close)
