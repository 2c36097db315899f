"""Jobs that too many workers died of, as they are kept for operators."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from octavo.v1 import job_pb2

if TYPE_CHECKING:
    from kvstore.client import Broker

logger = logging.getLogger(__name__)

FIELD: Final = b"d"
"""Field of an entry: octavo.v1.DeadJob."""
MAX_DEAD: Final = 1000
MAX_DEAD_BYTES: Final = 64 * 2**20
"""Dead jobs that are kept, about: as many as the smaller of the two allows."""
DEAD_TTL_MS: Final = 30 * 24 * 3600 * 1000
"""After the last of them."""
_PAGE: Final = 50


@dataclass(frozen=True, slots=True)
class Dead:
    """One dead job and its place."""

    entry_id: str
    record: job_pb2.DeadJob


class DeadJobs:
    """The dead of a fleet. A request id may be there more than once. All methods raise BrokerError."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def find(self, request_id: str = "") -> list[Dead]:
        """All of them, or those of one request id; the latest first. Entries that do not parse are left out and
        counted in ``broker.malformed``."""
        found: list[Dead] = []
        before = b"+"
        while True:
            page = await self._broker.call("XREVRANGE", self._broker.keys.dead, before, "-", "COUNT", _PAGE)
            for entry_id, fields in page:
                dead = self._parse(entry_id, (fields or {}).get(FIELD, b""))
                if dead is not None and request_id in ("", dead.record.job.request_id):
                    found.append(dead)
            if len(page) < _PAGE:
                return found
            before = b"(" + page[-1][0]

    async def get(self, request_id: str) -> Dead | None:
        """The latest of that id; None: there is none."""
        return next(iter(await self.find(request_id)), None)

    async def drop(self, request_id: str = "") -> int:
        """Forgets all of them, or those of one request id; how many."""
        if not request_id:
            length = int(await self._broker.call("XLEN", self._broker.keys.dead))
            await self._broker.call("DEL", self._broker.keys.dead)
            return length
        ids = [dead.entry_id for dead in await self.find(request_id)]
        return int(await self._broker.call("XDEL", self._broker.keys.dead, *ids)) if ids else 0

    def _parse(self, entry_id: bytes, data: bytes) -> Dead | None:
        try:
            record = job_pb2.DeadJob.FromString(data)
        except DecodeError:
            record = job_pb2.DeadJob()
        if not record.job.request_id:
            self._broker.malformed += 1
            logger.debug("skipped %r of %s: it is no dead job", entry_id, self._broker.keys.dead)
            return None
        return Dead(entry_id.decode(), record)


def most_kept(record: bytes) -> int:
    """How many of the dead are kept, about, when this one joins them."""
    return max(1, min(MAX_DEAD, MAX_DEAD_BYTES // max(len(record), 1)))
