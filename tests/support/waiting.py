"""Waiting for something that announces itself nowhere, such as a value in another process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

EVERY_S = 0.005


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float) -> None:
    """Returns once the condition holds; TimeoutError when it never does."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110 (nothing to await)
            await asyncio.sleep(EVERY_S)
