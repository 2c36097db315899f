"""Becoming the owner of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.block_hash import TOKEN_BYTES
from kvstore.endings import end_damaged
from kvstore.keys import GROUP
from kvstore.limits import MAX_CHOICES, MAX_JOB_BYTES, MAX_REST_BYTES
from kvstore.records import (
    MOST_ATTEMPTS,
    MOST_GATEWAY,
    MOST_MS,
    MOST_TOKENS,
    Claim,
    number,
    parse_job,
    parse_positions,
    remaining_of,
    require_choices,
)

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


def parse_claim(entry: Entry, answer: list[bytes | int | None], now_ms: int) -> Claim:
    """A claim from what the script read of a job. Raises ValueError when that isn't what we write."""
    payload, attempt, gateway, submitted_ms, claimed_ms, deadline_ms, choices, still_open, cached, *rest = answer
    predicted, *positions = rest
    job = parse_job(payload, entry.request_id)
    past, ended = parse_positions(positions, choices)
    require_choices(job, past)
    if not number(still_open, len(past)) == len(past) - len(ended) >= 1:
        raise ValueError(f"of its {len(past)} choices {len(ended)} have ended, and {still_open!r} are open")
    attempts = number(attempt, MOST_ATTEMPTS)
    if not isinstance(gateway, bytes) or len(gateway) > MOST_GATEWAY or attempts < 1:
        raise ValueError(f"its gateway is {gateway!r:.40} and its attempt {attempts}")
    return Claim(
        job=job,
        attempt=attempts,
        remaining_ms=remaining_of(deadline_ms, now_ms),
        queued_ms=max(0, number(claimed_ms, MOST_MS) - number(submitted_ms, MOST_MS)),
        gateway=gateway.decode(),
        entry_id=entry.entry_id,
        next=past,
        ended=ended,
        cached_tokens=number(cached, MOST_TOKENS),
        predicted=number(predicted, MOST_TOKENS),
    )
