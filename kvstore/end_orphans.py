"""Ending the jobs that nobody will run: those of dead workers, and those that a replaced incarnation had read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import BrokerAuth, BrokerError, BrokerUnreachable
from kvstore.keys import GROUP
from kvstore.token_log import encode_terminal
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from kvstore.client import Broker

logger = logging.getLogger(__name__)

_BATCH = 100
"""Jobs ended by one script call, which blocks the server for some 10 microseconds each."""


@dataclass(frozen=True, slots=True)
class Reaper:
    """Looks for dead workers. It keeps no state: any gateway may run it, at any time, next to others.

    What it reads here only says where to look; ``orphans.lua`` decides.
    """

    broker: Broker
    lease_ttl_ms: int
    retention_ms: int

    async def run(self) -> list[str]:
        """Request ids of the jobs that this call ended. Raises BrokerError."""
        keys = self.broker.keys
        members = await self.broker.call("ZRANGE", keys.workers, 0, -1, "WITHSCORES")
        workers = {
            member.decode(errors="replace"): float(beat)
            for member, beat in zip(members[::2], members[1::2], strict=True)
        }
        commands: list[tuple[Any, ...]] = []
        for worker in workers:
            commands += [
                ("HGET", keys.worker(worker), "incarnation"),
                ("XINFO CONSUMERS", keys.jobs(worker), GROUP),
            ]
        replies = await self.broker.pipeline(commands)
        ended: list[str] = []
        for worker, holder, consumers in zip(workers, replies[::2], replies[1::2], strict=True):
            try:
                if isinstance(holder, BrokerError):
                    raise holder
                if holder is None:
                    ended += await self._end_all(worker, "died" if workers[worker] > 0 else "left")
                elif not isinstance(consumers, BrokerError):
                    for consumer in consumers:
                        if consumer["name"] != holder:
                            ended += await self._end_pending(worker, consumer["name"])
            except (BrokerUnreachable, BrokerAuth):
                raise
            except BrokerError as error:
                # Keys of a wrong type. The other workers' jobs must not wait for somebody to clean that up.
                self.broker.malformed += 1
                logger.warning("jobs of worker %s are not looked after: %s", worker, error)
        return ended

    async def _end_all(self, worker: str, what: str) -> list[str]:
        """The jobs of a worker whose lease has lapsed, in batches, until its stream is gone or it is back."""
        ended: list[str] = []
        while True:
            items = await self.broker.call("XRANGE", self.broker.keys.jobs(worker), "-", "+", "COUNT", _BATCH)
            dead, some = await self._end(worker, items, f"worker {worker} {what}")
            ended += some
            # Each entry of a dead worker is removed, so this comes to an end.
            if not dead or not items:
                return ended

    async def _end_pending(self, worker: str, consumer: bytes) -> list[str]:
        """The jobs that an earlier incarnation of a live worker had read. What it had not read is left for the new
        one. With none, this only removes the consumer from the group."""
        stream = self.broker.keys.jobs(worker)
        ended: list[str] = []
        after = "-"
        while True:
            pending = await self.broker.call("XPENDING", stream, GROUP, after, "+", _BATCH, consumer, parse_detail=True)
            ids = [item["message_id"] for item in pending]
            ranges = await self.broker.pipeline([("XRANGE", stream, entry, entry) for entry in ids])
            # Trimmed by hand: nothing names its job any more. It only has to leave the group.
            items = [found[0] if found else (entry, {}) for entry, found in zip(ids, ranges, strict=True)]
            _, some = await self._end(worker, items, f"worker {worker} was restarted")
            ended += some
            if len(ids) < _BATCH:
                return ended
            after = "(" + ids[-1].decode()

    async def _end(self, worker: str, items: list[Any], why: str) -> tuple[bool, list[str]]:
        """Whether the worker is dead, and the request ids of the jobs ended."""
        keys = self.broker.keys
        requests = [((fields or {}).get(b"request", b"")).decode(errors="replace") for _, fields in items]
        names = [keys.workers, keys.worker(worker), keys.jobs(worker)]
        args: list[Any] = [
            GROUP,
            keys.prefix,
            self.retention_ms,
            worker,
            self.lease_ttl_ms,
            int(inference_pb2.ERROR),
        ]
        for (entry_id, _), request_id in zip(items, requests, strict=True):
            names += [keys.job(request_id), keys.log(request_id)]
            args += [
                entry_id,
                encode_terminal(request_id, inference_pb2.ERROR, job_pb2.FAILURE_UNAVAILABLE, why),
            ]
        state, *numbers = await self.broker.script("end_orphans", names, args)
        return state == b"dead", [requests[number - 1] for number in numbers]
