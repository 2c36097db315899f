"""The connection to the broker: Redis 7.0 or newer, or Valkey.

Two kinds of client, as one cannot serve both uses:

* ``Broker.commands``: short commands. No retries of its own, as only the caller knows whether doing something twice is
  harmless. ``call``, ``pipeline`` and ``script`` are the ways in: each attempt has a limit, so that a dead peer is
  noticed; they retry what is idempotent and translate exceptions.
* ``Broker.blocking()``: blocking reads and subscriptions. No retries: a read that is sent again after its reply was
  lost loses entries.

Neither has a socket timeout: the library would start a task for every command that it sends.

A command whose task is cancelled, or that times out, closes its connection: the reply that is still on its way must
not be read as the answer to the next command.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from kvstore.errors import BrokerError, BrokerTooOld, BrokerUnreachable, BrokerUrl, BrokerWrongType
from kvstore.keys import DEFAULT_NAMESPACE, Keys
from kvstore.parts import Parts
from kvstore.scripts import load_scripts
from kvstore.translation import CONNECTION_TROUBLE, execute, shown_url, translate, translated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")

FLOOR = (7, 0)
"""Oldest Redis version. Valkey, of any version, reports the one of Redis that it is compatible with: 7.2.4."""

_BACKOFF_BASE_S = 0.05
_BACKOFF_CAP_S = 1.0


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Where the broker is and how patient to be. Seconds throughout."""

    url: str
    namespace: str = DEFAULT_NAMESPACE
    connect_patience_s: float = 10.0
    """How long ``connect`` tries to reach a broker before it gives up."""
    connect_timeout_s: float = 2.0
    command_timeout_s: float = 5.0
    """For one attempt at a command, connecting included."""
    retries: int = 3
    """How often an idempotent command is sent again after a lost connection or reply."""
    max_connections: int = 64
    """Commands in flight at once; more wait for their turn."""


class Broker:
    """One process's access to the broker. Made by ``connect``; one per event loop."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.keys = Keys(config.namespace)
        self.commands = _client(config)
        self.spent = Parts()
        """What callers waited for: by script, by command in lower case, and in pipelines. Of calls that were answered
        in the end; what they were sent again for is part of it."""
        self.malformed = 0
        """Values found in the broker that did not parse. Only ever grows."""
        self.retried = 0
        """Commands sent again. Only ever grows."""
        self._scripts = load_scripts()
        # A bound of our own, since the pool answers a burst above its own bound with an error.
        self._slots = asyncio.Semaphore(config.max_connections)
        self._closed = False

    async def call(self, *command: Any, retry: bool = True, **options: Any) -> Any:
        """One command. ``retry=False`` where doing it twice differs from doing it once.

        ``options`` are for the client's parser of the reply.
        """
        name = str(command[0]).lower()
        try:
            return await self._attempts(name, lambda: execute(self.commands, *command, **options), retry=retry)
        except BrokerWrongType as error:
            raise BrokerWrongType(str(error), self.keys.among(command)) from error

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Several idempotent commands in one round trip, not as a transaction.

        A command that the broker answers with an error of its own (a key of another type, no such group) has a
        BrokerError in its place.
        """
        if not commands:
            return []

        async def run() -> list[Any]:
            async with self.commands.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                replies: list[Any] = await pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, CONNECTION_TROUBLE):
                    raise reply
            return replies

        replies = await self._attempts("pipeline", run, retry=True)
        return [
            translate(reply, keys=self.keys.among(command)) if isinstance(reply, RedisError) else reply
            for command, reply in zip(commands, replies, strict=True)
        ]

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Runs ``lua/<name>.lua``, which must be idempotent: it is sent again after a lost reply."""
        script = self._scripts[name]
        by_name, whole = ("EVALSHA_RO", "EVAL_RO") if script.reads else ("EVALSHA", "EVAL")

        async def run() -> Any:
            try:
                return await execute(self.commands, by_name, script.sha1, len(keys), *keys, *args)
            except NoScriptError:
                # A restarted or flushed server. EVAL loads it again for all later calls.
                return await execute(self.commands, whole, script.source, len(keys), *keys, *args)

        try:
            return await self._attempts(name, run, retry=True)
        except BrokerWrongType as error:
            raise BrokerWrongType(str(error), await self._of_another_type(keys)) from error

    def blocking(self) -> Redis:
        """A new client for blocking reads and subscriptions. The caller closes it (``await client.aclose()``)."""
        return _client(self.config)

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._closed = True
        await self.commands.aclose()

    async def _of_another_type(self, keys: Sequence[str]) -> list[str]:
        """Those which are not of the type that their names say."""
        types = await self.pipeline([("TYPE", key) for key in keys])
        known = [(key, told) for key, told in zip(keys, types, strict=True) if not isinstance(told, BrokerError)]
        return [key for key, told in known if told.decode() not in ("none", self.keys.type_of(key))]

    async def _attempts(self, name: str, do: Callable[[], Awaitable[T]], *, retry: bool) -> T:
        failures, began = 0, time.perf_counter()
        while True:
            if self._closed:
                raise BrokerUnreachable("the connection to the broker was closed by this process")
            try:
                async with self._slots:
                    done = await self._once(do)
            except BrokerUnreachable:
                failures += 1
                if not retry or failures > self.config.retries:
                    raise
            else:
                self.spent.add(name, time.perf_counter() - began)
                return done
            self.retried += 1
            await asyncio.sleep(backoff_s(failures))

    async def _once(self, do: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self.config.command_timeout_s):
                with translated(self.config.url):
                    return await do()
        except TimeoutError:
            where, limit = shown_url(self.config.url), self.config.command_timeout_s
            raise BrokerUnreachable(f"broker at {where} did not answer in {limit:g} s") from None


class _Pool(ConnectionPool):
    """The library's, but for connections that are being made while it is closed: they would stay open."""

    _times_closed = 0

    async def aclose(self) -> None:
        self._times_closed += 1
        await super().aclose()

    async def ensure_connection(self, connection: Any) -> None:
        before = self._times_closed
        await super().ensure_connection(connection)
        if self._times_closed != before:
            await connection.disconnect(nowait=True)
            raise RedisConnectionError("the connections were closed by this process")


async def connect(config: BrokerConfig) -> Broker:
    """Connects and checks what it finds.

    Raises BrokerUnreachable after ``connect_patience_s``, BrokerAuth and BrokerTooOld at once, BrokerUrl for a URL
    that is none. Warns when the broker may evict keys. No message contains the password.
    """
    broker = Broker(config)
    try:
        await _wait_until_reachable(broker)
        await _check_server(broker)
    except BaseException:
        await broker.close()
        raise
    return broker


def backoff_s(failures: int) -> float:
    """Pause after the n-th failure in a row (from 1): exponential, with full jitter so that many processes that lost
    the same server do not come back at once."""
    return random.uniform(0.1, 1.0) * min(_BACKOFF_CAP_S, _BACKOFF_BASE_S * 2.0 ** min(failures, 10))


def _client(config: BrokerConfig) -> Redis:
    # Options of the URL first, ours last: a URL may not switch on decoding or retries.
    try:
        options: dict[str, Any] = dict(parse_url(config.url))
    except ValueError:
        # Not chained: the original may quote a part of the URL, and with it of the password.
        raise BrokerUrl("not a URL of a broker: redis://, rediss:// or unix://, host, port and database") from None
    options.update(
        # Both pinned: the client's defaults for them have changed between versions.
        protocol=2,
        decode_responses=False,
        socket_timeout=None,
        retry=Retry(NoBackoff(), 0),
        # Above our own bound on commands in flight, which makes callers wait instead of fail.
        max_connections=config.max_connections + 1,
    )
    if "path" not in options:
        options.update(socket_connect_timeout=config.connect_timeout_s, socket_keepalive=True)
    return Redis.from_pool(_Pool(**options))


async def _wait_until_reachable(broker: Broker) -> None:
    give_up = time.monotonic() + broker.config.connect_patience_s
    failures = 0
    while True:
        try:
            await broker.call("PING", retry=False)
        except BrokerUnreachable as error:
            failures += 1
            pause = backoff_s(failures)
            if time.monotonic() + pause >= give_up:
                hint = "is a Redis running there, and are --redis and OCTAVO_REDIS right?"
                raise BrokerUnreachable(f"{error}; {hint}") from error
            if failures == 1:
                logger.warning("%s; trying for %g s", error, broker.config.connect_patience_s)
            await asyncio.sleep(pause)
        else:
            return


async def _check_server(broker: Broker) -> None:
    info: dict[str, Any] = await broker.call("INFO")
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR:
        floor = ".".join(map(str, FLOOR))
        raise BrokerTooOld(f"broker at {shown_url(broker.config.url)} is version {version}; {floor} is the oldest")
    if (harm := harm_of(str(info.get("maxmemory_policy")))) is not None:
        level, what = harm
        logger.log(level, "broker at %s may evict keys: %s", shown_url(broker.config.url), what)


def harm_of(policy: str) -> tuple[int, str] | None:
    """What a `maxmemory-policy` may do to a fleet, and how loudly to say so (a level of logging); None: nothing.

    What is work never has a TTL: so a policy that evicts only keys with one cannot lose an accepted job, but it can
    take a lease for a cache.
    """
    if policy == "noeviction":
        return None
    if policy.startswith("volatile-"):
        return logging.WARNING, (
            f"with maxmemory-policy {policy}, leases of workers that are alive, and answers that callers have not"
            " fetched yet, may vanish once maxmemory is reached; accepted jobs are safe. Set it to noeviction."
        )
    return logging.ERROR, (
        f"with maxmemory-policy {policy}, ACCEPTED JOBS MAY BE LOST once maxmemory is reached. Set it to noeviction,"
        " and keep pages in a server of their own."
    )
