"""Jobs that too many workers died of, as they are kept for operators."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from kvstore.logs import about
from octavo.v1 import job_pb2

if TYPE_CHECKING:
    from kvstore.client import Broker

logger = logging.getLogger(__name__)

MAX_DEAD: Final = 1000
MAX_DEAD_BYTES: Final = 64 * 2**20
"""Dead jobs that are kept, about: as many as the smaller of the two allows."""
DEAD_TTL_MS: Final = 30 * 24 * 3600 * 1000
"""After the last of them."""
_PAGE: Final = 50


class DeadJobs:
    """The dead of a fleet, of each request id the latest. All methods raise BrokerError.

    What does not parse is left out and counted in ``broker.malformed``.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def all(self) -> list[job_pb2.DeadJob]:
        """The latest first."""
        ids = await self._broker.call("ZREVRANGE", self._broker.keys.dead_times, 0, -1)
        found: list[job_pb2.DeadJob] = []
        for begin in range(0, len(ids), _PAGE):
            page = ids[begin : begin + _PAGE]
            records = await self._broker.call("HMGET", self._broker.keys.dead, *page)
            parsed = (self._parse(each, record) for each, record in zip(page, records, strict=True))
            found.extend(each for each in parsed if each is not None)
        return found

    async def get(self, request_id: str) -> job_pb2.DeadJob | None:
        """One of them, however many there are; None: there is none of that id."""
        return self._parse(request_id.encode(), await self._broker.call("HGET", self._broker.keys.dead, request_id))

    async def drop(self, request_id: str = "") -> int:
        """Forgets all of them, or one; how many."""
        keys = self._broker.keys
        if not request_id:
            count = int(await self._broker.call("HLEN", keys.dead))
            await self._broker.call("DEL", keys.dead, keys.dead_times)
            return count
        await self._broker.call("ZREM", keys.dead_times, request_id)
        return int(await self._broker.call("HDEL", keys.dead, request_id))

    def _parse(self, request_id: bytes, data: bytes | None) -> job_pb2.DeadJob | None:
        if data is None:
            return None
        try:
            record = job_pb2.DeadJob.FromString(data)
        except DecodeError:
            record = job_pb2.DeadJob()
        if record.job.request_id.encode() != request_id:
            self._broker.malformed += 1
            logger.debug(
                "skipped %r of %s: it is not that dead job",
                *(request_id, self._broker.keys.dead),
                extra=about(request_id.decode(errors="replace")),
            )
            return None
        return record


def most_kept(record: bytes) -> int:
    """How many of the dead are kept, about, when this one joins them."""
    return max(1, min(MAX_DEAD, MAX_DEAD_BYTES // max(len(record), 1)))
