"""A time limit for the other side alone: what the caller's own loop was busy with does not count."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SLICES: Final = 8
"""Pieces a limit is waited for in. One that ends late counts as one: its loop was busy, and may have the answer."""


@asynccontextmanager
async def loop_timeout(seconds: float) -> AsyncIterator[None]:
    """Like ``asyncio.timeout``, but a loop that is kept from running uses up a slice of the limit at most.

    A plain limit is over as soon as the loop has been busy for so long, and is then looked at before the answer that
    lies in the socket: under a crowd the other side would be taken for slow.

    Raises:
        TimeoutError: nothing came within the limit.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def wait(left: int) -> None:
        nonlocal timer
        if left:
            timer = loop.call_later(seconds / SLICES, wait, left - 1)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds / SLICES, wait, SLICES - 1)
        try:
            yield
        finally:
            timer.cancel()
