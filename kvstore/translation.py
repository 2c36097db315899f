"""The Redis client's exceptions as this package's own, and the cancellations that the client may swallow."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvstore.errors import BrokerAuth, BrokerError, BrokerFull, BrokerUnreachable, BrokerWrongType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from redis.asyncio import Redis

_AUTH = (AuthenticationError, AuthenticationWrongNumberOfArgsError, AuthorizationError, NoPermissionError)
# What passes by itself: a lost connection, a server that loads its data, or a failover in progress.
_PASSING = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
)
CONNECTION_TROUBLE: Final = (*_AUTH, *_PASSING, OutOfMemoryError)
"""What is wrong with a connection or a server, rather than with one command."""


async def execute(client: Redis, *command: Any, **options: Any) -> Any:
    """One command, once, by the given client, with its own exceptions."""
    with cancellation_kept():
        return await client.execute_command(*command, **options)  # type: ignore[no-untyped-call]


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turns exceptions of the Redis client into those of this package, and keeps cancellations."""
    try:
        with cancellation_kept():
            yield
    except RedisError as error:
        raise translate(error, url) from error


def translate(error: RedisError, url: str = "", keys: Sequence[str] = ()) -> BrokerError:
    """The one table from the client's exceptions to ours. ``keys``: those of the command, where they are known."""
    where = f" at {shown_url(url)}" if url else ""
    text = str(error).rstrip(".") or type(error).__name__
    if isinstance(error, _AUTH):
        return BrokerAuth(f"broker{where} refused access: {text}")
    if isinstance(error, OutOfMemoryError):
        return BrokerFull(f"broker{where} is full: {text}")
    # BUSY: somebody's script runs for seconds. It has no class of its own.
    if isinstance(error, _PASSING) or text.startswith("BUSY "):
        return BrokerUnreachable(f"broker{where} cannot be reached: {text}")
    if text.startswith("WRONGTYPE "):
        return BrokerWrongType(f"broker{where}: {text}", keys)
    return BrokerError(f"broker{where}: {text}")


@contextmanager
def cancellation_kept() -> Iterator[None]:
    """Raises CancelledError behind a block in which the current task was cancelled and something swallowed that.

    Until Python 3.12 ``asyncio.wait_for`` does when what it waits for is done in the same turn of the loop, and the
    client connects and reads through it. A task that was cancelled before the block is left alone: it cleans up.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


def shown_url(url: str) -> str:
    """``url`` without user, password and options."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"
