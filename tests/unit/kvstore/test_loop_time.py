"""A limit that a busy loop does not use up."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from kvstore.loop_time import loop_timeout

LIMIT_S = 0.08


async def answered_after(busy_s: float) -> bytes:
    """What is read of an answer that came at once, by a loop that was busy for so long first."""
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        reading = asyncio.create_task(asyncio.get_running_loop().sock_recv(near, 10))
        await asyncio.sleep(0)
        async with loop_timeout(LIMIT_S):
            far.send(b"answer")
            asyncio.get_running_loop().call_soon(time.sleep, busy_s)
            return await reading


async def test_a_loop_that_was_busy_beyond_the_limit_reads_what_had_come() -> None:
    assert await answered_after(2 * LIMIT_S) == b"answer"


async def test_silence_ends_at_the_limit() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with loop_timeout(LIMIT_S):
            await asyncio.Event().wait()
    assert time.monotonic() - began >= LIMIT_S * 0.99


async def test_nothing_is_cancelled_once_it_is_over() -> None:
    async with loop_timeout(LIMIT_S):
        pass
    await asyncio.sleep(2 * LIMIT_S)
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_another_s_cancelling_stays_a_cancelling() -> None:
    async def wait() -> None:
        async with loop_timeout(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
