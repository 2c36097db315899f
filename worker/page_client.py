"""A worker's way to the store of pages: whatever goes wrong there ends here."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.outage import Outage
from worker.circuit import Circuit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.page import PageFormat
    from kvstore.page_store import PageStore
    from worker.page_metrics import PageMetrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALL_S: Final = 3.0
"""A call that takes longer is given up."""
FETCH_BYTES: Final = 4 << 20
"""Of values in one call, about: what the store, the network and this process hold of it at once."""


class PageClient:
    """Calls the store, counts what fails, and leaves it alone for a while when it does."""

    def __init__(self, store: PageStore, form: PageFormat, metrics: PageMetrics) -> None:
        self.store = store
        self.form = form
        self.metrics = metrics
        # A store may be read and not written to: one that is full, or may only be read, or a folder without rights.
        self._reads, self._writes = Circuit(), Circuit()
        self._failing: set[Circuit] = set()
        """Whose last call failed: an outage lasts until there are none."""
        self._outage = Outage(logger, "using the store of pages")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")

    @property
    def at_once(self) -> int:
        """Pages in one call."""
        return max(FETCH_BYTES // self.form.value_bytes, 1)

    async def call(self, do: Callable[[], Awaitable[T]], *, limit_s: float = CALL_S, reads: bool = False) -> T | None:
        """What the store answers; None when it doesn't, or is left alone for now. Raises nothing.

        With a ``limit_s`` below CALL_S a call that takes longer is given up as well, and the store is not to blame.
        ``reads``: it writes nothing. Who writes is not stopped by reads that fail, nor the other way round."""
        circuit = self._reads if reads else self._writes
        if not circuit.allows(time.monotonic()):
            return None
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                answer = await do()
        except Exception as error:  # whatever a store raises, no request is to suffer for it
            if limit.expired() and limit_s < CALL_S:
                return None
            circuit.failed(time.monotonic())
            self._failing.add(circuit)
            self.metrics.error(error)
            self._outage.failed(f"no answer in {limit_s:g} s" if limit.expired() else error)
            return None
        circuit.worked()
        self._failing.discard(circuit)
        if not self._failing:
            self._outage.worked()
        return answer

    async def until_allowed(self, *, reads: bool = False) -> None:
        """Waits while the store is left alone by those who write, or by those who read."""
        await asyncio.sleep((self._reads if reads else self._writes).wait_s(time.monotonic()))

    async def beside(self, do: Callable[[], T]) -> T:
        """Does it in a thread of its own: checksums of megabytes are not for the event loop, nor for the engine."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    async def close(self) -> None:
        """The store is not used any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self.store.close()
