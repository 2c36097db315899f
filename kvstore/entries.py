"""Reading a worker's stream of jobs."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

from kvstore.errors import BrokerError, BrokerUnreachable
from kvstore.keys import GROUP
from kvstore.logs import about
from kvstore.registry import LEASE_TTL_MS
from kvstore.translation import execute, translate

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from kvstore.client import Broker
    from kvstore.records import JobRecord

logger = logging.getLogger(__name__)

NEW = ">"
"""Entries that no consumer has been given yet."""
PENDING_AT_ONCE = 16
"""Entries per read of what is pending, at least. Mostly they run already, so that no room is needed for them; and what
is new waits until all of them are looked through."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a worker's stream."""

    entry_id: str
    request_id: str
    """Empty when the entry was not written by ``submit``; ``claim`` removes such entries."""


class EntryReader:
    """Reads as one or several consumers, each of which has one read in flight at most.

    The server marks entries as delivered when it answers. If that answer is lost, nobody is ever given them again, so
    after a failed read a consumer first goes through all that is pending for it; and whenever it is told to, ``again``.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # By (worker, incarnation): the pending entry looked at last, None once all were. Absent: not looked yet.
        self._position: dict[tuple[str, str], str | None] = {}
        self._again: set[tuple[str, str]] = set()
        """Consumers whose next read begins with what is pending."""
        self._groups_made: set[str] = set()

    def again(self, worker: str, incarnation: str) -> None:
        """See ``Jobs.read_again``."""
        self._again.add((worker, incarnation))

    async def read(self, client: Redis, worker: str, incarnation: str, count: int, block_ms: int) -> list[Entry]:
        """See ``Jobs.next_entries``."""
        consumer = (worker, incarnation)
        if consumer in self._again:
            self._again.discard(consumer)
            self._position[consumer] = "0"
        position = self._position.get(consumer, "0")
        try:
            if position is not None:
                pending = await self._fetch(client, consumer, position, max(count, PENDING_AT_ONCE), 0)
                if pending:
                    self._position[consumer] = pending[-1].entry_id
                    return pending
                self._position[consumer] = None
            return await self._fetch(client, consumer, NEW, count, block_ms)
        except BaseException:
            # Cancellation too: the answer may be under way.
            self._position[consumer] = "0"
            raise

    async def _fetch(
        self, client: Redis, consumer: tuple[str, str], after: str, count: int, block_ms: int
    ) -> list[Entry]:
        worker, incarnation = consumer
        stream = self._broker.keys.jobs(worker)
        # BLOCK 0 would be for ever.
        block = ("BLOCK", block_ms) if block_ms > 0 else ()
        command = ("XREADGROUP", "GROUP", GROUP, incarnation, "COUNT", count, *block, "STREAMS", stream, after)
        config = self._broker.config
        try:
            # A dead server does not end a blocking read by itself.
            async with asyncio.timeout(block_ms / 1000 + config.command_timeout_s):
                reply = await execute(client, *command)
        except TimeoutError:
            raise BrokerUnreachable("the broker did not answer a blocking read in time") from None
        except ResponseError as error:
            # UNBLOCKED: the stream was deleted during the read.
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise translate(error, config.url) from error
            await self._make_group(stream)
            return []
        except RedisError as error:
            raise translate(error, config.url) from error
        return [_entry(item) for _, items in reply or [] for item in items]

    async def _make_group(self, stream: str) -> None:
        """A new stream has no group, nor has any after a flush. From 0, so that what was submitted before is read."""
        if stream in self._groups_made:
            # Somebody keeps deleting it: do not spin.
            await asyncio.sleep(random.uniform(0.05, 0.25))
        self._groups_made.add(stream)
        try:
            await self._broker.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
        except BrokerError as error:
            if "BUSYGROUP" not in str(error):
                raise


async def put_back(broker: Broker, record: JobRecord, *, lease_ttl_ms: int = LEASE_TTL_MS) -> bool:
    """Puts a job back into its worker's stream if its entry is gone, because somebody deleted or trimmed that, and no
    worker runs it: from there it is claimed, or moved, like any other. Whether it did. May be repeated.

    Raises BrokerError; BrokerWrongType when the stream is none any more.
    """
    keys, worker = broker.keys, record.worker
    names = [keys.job(record.request_id), keys.workers, keys.worker(worker), keys.jobs(worker)]
    done = bool(await broker.script("put_back", names, [worker, record.entry, lease_ttl_ms]))
    if done:
        told = "job %s was not in the stream of worker %s any more: put back"
        logger.warning(told, record.request_id, worker, extra=about(record.request_id))
    return done


def _entry(item: tuple[bytes, Any]) -> Entry:
    entry_id, fields = item
    request = fields.get(b"request", b"") if isinstance(fields, dict) else b""
    try:
        return Entry(entry_id.decode(), request.decode())
    except UnicodeDecodeError:
        return Entry(entry_id.decode(), "")
