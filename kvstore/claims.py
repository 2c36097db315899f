"""Becoming the owner of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.block_hash import TOKEN_BYTES
from kvstore.endings import end_damaged
from kvstore.keys import GROUP
from kvstore.limits import MAX_CHOICES, MAX_JOB_BYTES, MAX_REST_BYTES
from kvstore.records import Claim, parse_claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Broker
    from kvstore.entries import Entry


async def claim(
    broker: Broker, worker: str, incarnation: str, entries: Sequence[Entry], *, retention_ms: int
) -> list[Claim]:
    """See ``Jobs.claim``."""
    if not entries:
        return []
    keys = broker.keys
    names = [keys.jobs(worker), keys.worker(worker), keys.load(worker, incarnation)]
    names += [keys.job(entry.request_id) for entry in entries]
    args: list[Any] = [GROUP, worker, incarnation, keys.load(worker, "")]
    args += [MAX_REST_BYTES, TOKEN_BYTES, MAX_JOB_BYTES, MAX_CHOICES]
    args += [entry.entry_id for entry in entries]
    now, *answers = await broker.script("claim", names, args) or [0]
    claims: list[Claim] = []
    for entry, answer in zip(entries, answers, strict=False):
        if answer == 0:
            continue
        try:
            claims.append(parse_claim(entry, answer, int(now)))
        except ValueError as error:
            await end_damaged(broker, entry.request_id, str(error), retention_ms=retention_ms)
    return claims
