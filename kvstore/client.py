"""The connection to the broker: Redis 7.0 or newer, or Valkey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.keys import DEFAULT_NAMESPACE, Keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Where the broker is and how patient to be. Seconds throughout."""

    url: str
    namespace: str = DEFAULT_NAMESPACE
    connect_patience_s: float = 10.0
    """How long ``connect`` tries to reach a broker before it gives up."""
    connect_timeout_s: float = 2.0
    command_timeout_s: float = 5.0
    retries: int = 3
    """How often an idempotent command is sent again after a lost connection or reply."""


class Broker:
    """One process's access to the broker. Made by ``connect``; one per event loop."""

    config: BrokerConfig
    keys: Keys
    commands: Redis
    malformed: int
    """Values found in the broker that did not parse. Only ever grows."""

    async def call(self, *command: Any, retry: bool = True) -> Any:
        """One command. ``retry=False`` where doing it twice differs from doing it once."""
        raise NotImplementedError

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Several idempotent commands in one round trip; errors of single commands come back as values."""
        raise NotImplementedError

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Runs ``lua/<name>.lua``, which must be idempotent: it is sent again after a lost reply."""
        raise NotImplementedError

    async def server_time_ms(self) -> int:
        """The broker's clock, milliseconds since the epoch."""
        raise NotImplementedError

    def blocking(self) -> Redis:
        """A new client for blocking reads and subscriptions: no socket timeout, no retries. The caller closes it
        (``await client.aclose()``)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        raise NotImplementedError


async def connect(config: BrokerConfig) -> Broker:
    """Connects and checks what it finds.

    Raises BrokerUnreachable after ``connect_patience_s``, BrokerAuth and BrokerTooOld at once, ValueError for a URL
    that is none. Warns when the broker may evict keys. No message contains the password.
    """
    raise NotImplementedError
