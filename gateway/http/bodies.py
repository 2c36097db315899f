"""Bodies of HTTP requests: read within bounds, and made objects of without holding up anybody's stream."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gateway.http.problems import Failed, Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

    T = TypeVar("T")

LARGE: Final = 64 * 1024
"""Bytes of a body from which on a thread takes it apart."""
MAX_LARGE: Final = 16
"""Such bodies that are held at once. The others' senders wait."""
READ_S: Final = 30.0
"""How long a body may take to come."""
DISCARD_S: Final = 10.0
"""How long the rest of a refused one may take, which is read and thrown away."""
MAX_DISCARDED: Final = 64 * 2**20
"""Bytes of it."""


class Bodies:
    """Reads bodies of at most `limit` bytes. One thread for all that is large: Python has but one lock, and it is to be
    had by the streams in between."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._room = asyncio.Semaphore(MAX_LARGE)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="http-body")

    async def read(self, request: Request, make: Callable[[dict[str, Any]], T]) -> T:
        """What `make` makes of the body, a JSON object. Raises Failed, and what `make` raises."""
        parts = request.stream()
        async with AsyncExitStack() as held:
            body, large = bytearray(), False
            try:
                check_head(request, "application/json", self._limit)
                async with asyncio.timeout(READ_S):
                    async for part in parts:
                        body += part
                        if len(body) > self._limit:
                            raise too_large("body", self._limit)
                        if len(body) > LARGE and not large:
                            large = True
                            await held.enter_async_context(self._room)
            except TimeoutError:
                message = f"the body did not come within {READ_S:g} s"
                raise Failed(Problem(408, message, headers={"connection": "close"})) from None
            except Failed:
                if "expect" not in request.headers:  # else it waits to be told whether to send it
                    await discard(parts)
                raise
            return await self.run(lambda: make(parsed(bytes(body))), large=large)

    async def run(self, work: Callable[[], T], *, large: bool) -> T:
        """What `work` gives; where it is large, by the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work) if large else work()

    async def close(self) -> None:
        """Waits for what runs; drops what has not begun."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises Failed: for anything else, and for one that is nested too deeply."""
    try:
        # By functions of Python, so that others get the interpreter between two of a million token ids.
        hooks: dict[str, Any] = {"parse_int": _integer, "object_hook": _object} if len(body) > LARGE else {}
        value = json.loads(body.decode(), parse_constant=_no_constant, **hooks)
    except RecursionError:
        raise Failed(Problem(400, "the body is nested too deeply")) from None
    except ValueError as error:
        raise Failed(Problem(400, f"the body is not valid JSON: {error}")) from None
    if not isinstance(value, dict):
        raise Failed(Problem(400, "the body must be a JSON object"))
    return value


async def discard(parts: AsyncIterator[bytes], most: int = MAX_DISCARDED, within_s: float = DISCARD_S) -> None:
    """Reads on for a while: a client that is cut off while it sends may not see why. `most`: bytes."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            async for part in parts:
                size += len(part)
                if size > most:
                    return


def _integer(text: str) -> int:
    return int(text)


def _object(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def check_head(request: Request, wanted: str, limit: int) -> None:
    """Refuses what can be refused before a byte is read: a content-type that is not `wanted`, an encoding, a size."""
    # Not what a browser sends to another site without asking that first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted:
        raise Failed(Problem(415, f"content-type is {kind[:64]!r}: must be {wanted}"))
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Failed(Problem(415, "content-encoding is set: bodies are taken as they are; leave it out"))
    size = request.headers.get("content-length", "0")
    if size.isdigit() and int(size[:20]) > limit:
        raise too_large("body", limit)


def too_large(what: str, limit: int) -> Failed:
    """`limit`: bytes."""
    return Failed(Problem(413, f"the {what} is too large: must have at most {limit} bytes ({limit // 2**20} MiB)"))
