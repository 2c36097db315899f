"""Who lives: leases of workers and gateways, what workers are charged with, and the models they serve.

A lease is a key with a short TTL that one incarnation renews. All ages are the broker's, so hosts' clocks may differ.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from kvstore.errors import BrokerError, MalformedValue, WorkerIdTaken
from kvstore.model_card import ModelCard, card_of, digest, fields_of
from kvstore.worker_info import (
    DRAINING,
    LOAD_FIELDS,
    READY,
    Load,
    Renewed,
    WorkerInfo,
    lease_fields,
    parse_lease,
    parse_load,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from kvstore.client import Broker

__all__ = [
    "DRAINING",
    "HEARTBEAT_S",
    "LEASE_TTL_MS",
    "MODEL_RENEW_S",
    "READY",
    "Load",
    "ModelCard",
    "Registry",
    "Renewed",
    "WorkerInfo",
    "new_incarnation",
]

logger = logging.getLogger(__name__)

LEASE_TTL_MS = 3000
HEARTBEAT_S = 1.0
HELD_LEASES = 4
"""TTLs of a lease that the set of held blocks lives without being renewed: a worker that was frozen for longer than its
lease finds it again."""
GOODBYE_MS = 3600 * 1000
"""For how long it is known that a worker did not die which left with jobs in its stream, or was about to."""
MODEL_TTL_MS = 60_000
MODEL_RENEW_S = 20.0

_LEASE_POLL_S = 0.1


def new_incarnation() -> str:
    """16 hex characters that name one life of a process. Never reused."""
    return secrets.token_hex(8)


class Registry:
    """Leases, loads and model cards. All methods raise BrokerError."""

    def __init__(self, broker: Broker, *, lease_ttl_ms: int = LEASE_TTL_MS, model_ttl_ms: int = MODEL_TTL_MS) -> None:
        self._broker = broker
        self._lease_ttl_ms = lease_ttl_ms
        self._model_ttl_ms = model_ttl_ms

    async def register(self, info: WorkerInfo) -> None:
        """Takes the lease of ``info.id``.

        Waits for a lease that is about to lapse, as after a crash and a quick restart. Raises WorkerIdTaken as soon
        as its holder is seen to renew it, and after one TTL in any case.
        """
        await self._until_free(info.id, lambda: self._lease(info))

    async def require_free(self, worker: str) -> None:
        """Waits and raises as ``register`` does, but takes nothing: for a look before what takes long."""
        await self._until_free(worker, lambda: self._holder(worker))

    async def renew(self, info: WorkerInfo) -> Renewed:
        """Heartbeat: extends the lease and the set of held blocks, and writes what ``info`` says. To be repeated every
        HEARTBEAT_S. A lease that vanished is made again. Of a worker that runs nothing, has nothing waiting and nothing
        in its stream, the load is made nothing.
        """
        reply = await self._write_lease(info)
        return Renewed(True, int(reply[1])) if reply[0] == 1 else Renewed(False, 0)

    async def leave(self, worker: str, incarnation: str, *, goodbye: bool = True) -> None:
        """Gives the lease back. Jobs that are still in the stream are orphans, see ``Jobs.orphans``. Without a goodbye
        the worker broke: it has died of those that it ran, for all that the fleet can know."""
        keys = self._broker.keys
        await self._broker.script(
            "leave",
            [
                *(keys.worker(worker), keys.workers, keys.jobs(worker)),
                *(keys.load(worker, incarnation), keys.held(worker, incarnation), keys.left(worker, incarnation)),
            ],
            [worker, incarnation, GOODBYE_MS, "" if goodbye else "broke"],
        )

    async def workers(self) -> list[WorkerInfo]:
        """Live workers, by id. Leases that do not parse are left out and counted."""
        keys = self._broker.keys
        (seconds, micros), members = await self._broker.pipeline(
            [("TIME",), ("ZRANGE", keys.workers, 0, -1, "WITHSCORES")]
        )
        if isinstance(members, BrokerError):
            raise members
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        beats = sorted(zip(members[::2], members[1::2], strict=True))
        leases = await self._broker.pipeline(
            [("HGETALL", keys.worker(worker.decode(errors="replace"))) for worker, _ in beats]
        )
        found: list[WorkerInfo] = []
        for (worker, beat), lease in zip(beats, leases, strict=True):
            if lease:
                try:
                    beat_ms = int(float(beat))
                    found.append(parse_lease(worker, lease, max(0, now_ms - beat_ms), beat_ms))
                except MalformedValue as error:
                    self._broker.malformed += 1
                    logger.debug("skipped: %s", error)
        return found

    async def loads(self, workers: Sequence[WorkerInfo]) -> dict[str, Load]:
        """By worker id, for the incarnations given. One round trip."""
        keys = self._broker.keys
        replies = await self._broker.pipeline(
            [("HMGET", keys.load(worker.id, worker.incarnation), *LOAD_FIELDS) for worker in workers]
        )
        return {worker.id: self._load_of(reply) for worker, reply in zip(workers, replies, strict=True)}

    async def renew_gateway(self, incarnation: str) -> None:
        """Heartbeat of a gateway. To be repeated every HEARTBEAT_S."""
        await self._broker.script("gateway", [self._broker.keys.gateway(incarnation)], [self._lease_ttl_ms])

    async def leave_gateway(self, incarnation: str) -> None:
        """Gives a gateway's lease back."""
        await self._broker.call("DEL", self._broker.keys.gateway(incarnation))

    async def live_gateways(self, incarnations: Iterable[str]) -> set[str]:
        """Those of ``incarnations`` whose lease has not lapsed. One round trip."""
        asked = sorted(set(incarnations))
        replies = await self._broker.pipeline([("EXISTS", self._broker.keys.gateway(one)) for one in asked])
        return {one for one, reply in zip(asked, replies, strict=True) if reply == 1}

    async def publish_model(self, card: ModelCard) -> None:
        """Writes or extends a model's card. To be repeated every MODEL_RENEW_S.

        Megabytes are sent only when the broker has no card, or another one.
        """
        keys = [self._broker.keys.model(card.fingerprint)]
        args = [self._model_ttl_ms, digest(card)]
        if not await self._broker.script("model", keys, args):
            await self._broker.script("model", keys, [*args, *fields_of(card)])

    async def model(self, fingerprint: str) -> ModelCard | None:
        """None when no worker has published it lately, or when what is there does not parse (which is counted)."""
        stored: dict[bytes, bytes] = await self._broker.call("HGETALL", self._broker.keys.model(fingerprint))
        if not stored:
            return None
        try:
            return card_of(fingerprint, stored)
        except MalformedValue as error:
            self._broker.malformed += 1
            logger.warning("model card of %s ignored: %s", fingerprint, error)
            return None

    async def _until_free(self, worker: str, look: Callable[[], Awaitable[tuple[str, int] | None]]) -> None:
        """``look``: None when the lease is free or ours; otherwise its holder and the time left in ms."""
        give_up = time.monotonic() + self._lease_ttl_ms / 1000 + 2 * _LEASE_POLL_S
        left_before = self._lease_ttl_ms
        while (taken := await look()) is not None:
            holder, left_ms = taken
            # A lease's time left only grows when it is renewed.
            if left_ms > left_before or time.monotonic() > give_up:
                raise WorkerIdTaken(worker, holder)
            left_before = left_ms
            await asyncio.sleep(min(_LEASE_POLL_S, left_ms / 1000 + 0.001))

    async def _holder(self, worker: str) -> tuple[str, int] | None:
        key = self._broker.keys.worker(worker)
        holder, left_ms = await self._broker.pipeline([("HGET", key, "incarnation"), ("PTTL", key)])
        if isinstance(holder, BrokerError):
            raise holder
        return None if holder is None else (holder.decode(errors="replace"), int(left_ms))

    async def _lease(self, info: WorkerInfo) -> tuple[str, int] | None:
        """None when the lease is ours; otherwise its holder and the time left in ms."""
        reply = await self._write_lease(info)
        return None if reply[0] == 1 else (reply[1].decode(errors="replace"), int(reply[2]))

    async def _write_lease(self, info: WorkerInfo) -> Any:
        """What lease.lua returns."""
        keys = self._broker.keys
        return await self._broker.script(
            "lease",
            [
                *(keys.worker(info.id), keys.workers, keys.held(info.id, info.incarnation)),
                *(keys.load(info.id, info.incarnation), keys.jobs(info.id), keys.left(info.id, info.incarnation)),
            ],
            [
                *(self._lease_ttl_ms, HELD_LEASES * self._lease_ttl_ms, info.id, info.incarnation),
                *(int(info.running == info.waiting == 0), GOODBYE_MS if info.state == DRAINING else ""),
                *lease_fields(info),
            ],
        )

    def _load_of(self, reply: Any) -> Load:
        if isinstance(reply, BrokerError):
            self._broker.malformed += 1
            return Load()
        return parse_load(reply)
