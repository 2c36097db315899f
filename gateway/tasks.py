"""Tasks beside the calls: kept alive, ended in order, and never silent about a failure."""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.errors import BrokerError
from kvstore.logs import about
from kvstore.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """A set of tasks. asyncio itself keeps only weak references to them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, work: Coroutine[Any, Any, T], *, name: str, awaited: bool = False, request_id: str = ""
    ) -> asyncio.Task[T]:
        """Starts `work`. Its failure is logged, unless it is `awaited`: then it is for whoever awaits it to handle.
        `request_id`: of the job that it is about, if it is about one."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard if awaited else partial(self._done, request_id))
        return task

    async def drain(self, timeout_s: float) -> None:
        """Waits for all tasks, for at most `timeout_s` seconds, then cancels the rest."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        await self.cancel()

    async def cancel(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        while pending := set(self._tasks):  # one that ends may have started another
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)

    def _done(self, request_id: str, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %r failed", task.get_name(), exc_info=error, extra=about(request_id))


class Turn(Enum):
    """What an action may say of a turn of ``every``."""

    SKIPPED = "skipped"


SKIPPED: Final = Turn.SKIPPED
"""Nothing was tried in this turn, so it tells neither of trouble nor that trouble is over."""


async def every(interval_s: float, action: Callable[[], Awaitable[object]], *, what: str) -> None:
    """Runs `action` every `interval_s` seconds until cancelled. Failures are logged when they begin, at growing
    intervals while they last, and when `action` works again: returns, and not SKIPPED."""
    outage = Outage(logger, what)
    while True:
        try:
            outcome = await action()
        except BrokerError as error:
            outage.failed(error)
        except Exception as error:
            # A fault of ours in one turn must not end all later turns: a lease would lapse, orphans would hang.
            outage.failed(error, traceback=True)
        else:
            if outcome is not SKIPPED:
                outage.worked()
        await asyncio.sleep(interval_s)
