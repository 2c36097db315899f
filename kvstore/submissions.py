"""Accepting a job, once; and reading what is known of it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from kvstore.endings import end_damaged
from kvstore.errors import BrokerError, BrokerFull, OverQuota, QueueFull, RequestIdTaken, WorkerGone
from kvstore.limits import broken
from kvstore.records import (
    MOST_TOKENS,
    RECORD_FIELDS,
    Attached,
    JobRecord,
    JobState,
    Submitted,
    charge,
    number,
    parse_record,
)
from kvstore.tenants import tenant_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Broker
    from kvstore.tenants import Quota
    from octavo.v1 import job_pb2

MAX_DEADLINE_MS = 10**12
"""Some thirty years: keeps sums with the clock exact in a script's doubles."""

MAX_ROUTES = 10_000
MAX_ROUTES_BYTES = 16 * 2**20
"""Decisions that are kept for operators, about: as many as the smaller of the two allows."""
ROUTES_TTL_MS = 24 * 3600 * 1000
"""After the last of them."""


def new_caller(client: str = "") -> str:
    """A name for one call of a client, by the name that this goes by, if any."""
    return calls_of(client) + secrets.token_hex(8)


def calls_of(client: str) -> str:
    """What the names of all its calls begin with. `client`: has no colon."""
    return f"{client}:"


async def submit(
    broker: Broker,
    job: job_pb2.Job,
    *,
    digest: bytes,
    worker: str,
    worker_incarnation: str,
    gateway: str,
    caller: str,
    deadline_ms: int | None,
    max_queue: int,
    prefill: int,
    predicted: int,
    route: bytes,
    quota: Quota,
) -> Submitted:
    """See ``Jobs.submit``."""
    if not job.request_id or not job.prompt_token_ids:
        raise ValueError("a job needs a request id and a prompt")
    if reason := broken(job):
        raise ValueError(f"no gateway lets such a job through: {reason}")
    keys, caller, tenant = broker.keys, caller or new_caller(), tenant_of(job.request_id)
    prompt = len(job.prompt_token_ids)
    args: list[Any] = [
        *(job.SerializeToString(), digest, caller, worker, worker_incarnation, gateway),
        *("" if deadline_ms is None else _bounded(deadline_ms), max_queue),
        *(charge(job), prompt, max(job.n, 1), max(prefill, 0), max(predicted, 0)),
        *(route, min(MAX_ROUTES, MAX_ROUTES_BYTES // max(len(route), 1)), ROUTES_TTL_MS),
        *("1" if job.detached else "", "1" if tenant else ""),
        *(_limit(each) for each in (quota.requests_per_minute, quota.tokens_per_minute, quota.concurrency)),
    ]
    names = [
        *(keys.job(job.request_id), keys.log(job.request_id), keys.jobs(worker), keys.worker(worker)),
        *(keys.load(worker, worker_incarnation), keys.routes, keys.quota(tenant), keys.live(tenant)),
    ]
    try:
        answer, *details = await broker.script("submit", names, args)
    except BrokerFull:
        # It may be there already, from an attempt whose reply was lost or from another gateway.
        attached = await attach(broker, job.request_id, digest, caller, gateway)
        if attached is None:
            raise
        return attached.submitted
    if answer == b"taken":
        raise RequestIdTaken(job.request_id)
    if answer == b"full":
        raise QueueFull(worker, int(details[0]), max_queue)
    if answer == b"over":
        what, count, wait_ms = details[0].decode(), int(details[1]), int(details[2])
        limits = {"requests": quota.requests_per_minute, "tokens": quota.tokens_per_minute, "jobs": quota.concurrency}
        raise OverQuota(what, count, limits[what] or 0, wait_ms if wait_ms >= 0 else None)
    if answer == b"gone":
        raise WorkerGone(worker, worker_incarnation, details[0].decode(errors="replace"))
    return Submitted(answer.decode())


async def attach(broker: Broker, request_id: str, digest: bytes | None, caller: str, gateway: str) -> Attached | None:
    """None: there is no such job. ACCEPTED: this caller asked for it last."""
    names = [broker.keys.job(request_id)]
    args = [digest or b"", caller or new_caller(), gateway, "1" if digest is None else ""]
    answer, *details = await broker.script("attach", names, args)
    if answer == b"taken":
        raise RequestIdTaken(request_id)
    if answer == b"unknown":
        return None
    worker, predicted, fingerprint = details
    try:
        expected = number(predicted, MOST_TOKENS)
    except ValueError:  # not written by us
        expected = 0
    return Attached(
        Submitted(answer.decode()),
        worker.decode(errors="replace"),
        expected,
        fingerprint.decode(errors="replace"),
    )


async def records(broker: Broker, request_ids: Sequence[str], retention_ms: int) -> list[JobRecord | None]:
    """See ``Jobs.several``."""
    (seconds, micros), *stored = await broker.pipeline(
        [("TIME",), *(("HMGET", broker.keys.job(each), *RECORD_FIELDS) for each in request_ids)]
    )
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    found: list[JobRecord | None] = []
    for request_id, fields in zip(request_ids, stored, strict=True):
        try:
            found.append(parse_record(request_id, fields, now_ms))
        except ValueError as error:
            found.append(None)
            if fields[0] == JobState.ENDED.encode():
                broker.malformed += 1
            else:
                await end_damaged(broker, request_id, str(error), retention_ms=retention_ms)
    return found


async def route(broker: Broker, request_id: str) -> bytes:
    """The octavo.v1.RouteRecord that came with a job; empty: none did, or so many came later that it is gone."""
    entry = await broker.call("HGET", broker.keys.job(request_id), "route")
    if entry is None:
        return b""
    # Errors are ids that are none, and a key of another type: somebody else wrote them.
    (found,) = await broker.pipeline([("XRANGE", broker.keys.routes, entry, entry)])
    if isinstance(found, BrokerError):
        broker.malformed += 1
        return b""
    return bytes(found[0][1].get(b"d", b"")) if found else b""


async def inherit(broker: Broker, request_id: str, leaver: str, heir: str, gateway: str) -> None:
    """See ``Jobs.inherit``."""
    await broker.script("inherit", [broker.keys.job(request_id)], [leaver, heir, gateway])


def _limit(limit: int | None) -> int | str:
    return "" if limit is None else limit


def _bounded(deadline_ms: int) -> int:
    return min(max(deadline_ms, 0), MAX_DEADLINE_MS)
