"""Waiting for something that announces itself nowhere, such as a value in another process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

EVERY_S: Final = 0.02


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float) -> None:
    """Returns once the condition holds. Raises TimeoutError when it never does."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110 (nothing to await)
            await asyncio.sleep(EVERY_S)
