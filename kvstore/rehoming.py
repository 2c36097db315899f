"""Moving an orphan to a worker that runs it, or giving it up."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from kvstore.dead import DEAD_TTL_MS, most_kept
from kvstore.keys import GROUP
from kvstore.limits import MAX_CHOICES
from kvstore.orphans import ALONE_DEATHS, Orphan, Rehomed, Target, read
from kvstore.token_log import encode_terminal
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from kvstore.client import Broker

ORPHAN_WAIT_S = 30.0
"""How long the jobs of a worker wait for others that could run them, from when they were first found without one; a job
for which there was one since, from then on."""
_MARK_TTL_MS = 3600 * 1000
"""Of a suspect's mark: longer than anything that runs is without a few tokens."""


async def rehome(
    broker: Broker,
    orphan: Orphan,
    target: Target | None,
    *,
    lease_ttl_ms: int,
    retention_ms: int,
    orphan_wait_ms: int,
) -> Rehomed:
    """See ``Jobs.rehome``."""
    keys, request_id, record = broker.keys, orphan.request_id, b""
    if orphan.kept and (orphan.doomed or target is None):
        return Rehomed.WAITING
    if orphan.doomed:
        job = await read(broker, orphan, retention_ms)
        if job is None:
            return Rehomed.STALE
        record = _dead_job(orphan, job)
    elif target is None and orphan.waited_ms <= orphan_wait_ms:
        return Rehomed.WAITING
    late = f"worker {orphan.worker} {orphan.why}, and for {orphan_wait_ms / 1000:g} s there was no other to run it"
    names = [keys.workers, keys.worker(orphan.worker), keys.jobs(orphan.worker)]
    names += [keys.job(request_id), keys.log(request_id), keys.dead, keys.orphaned(orphan.worker)]
    args: list[Any] = [
        *(GROUP, keys.prefix, orphan.worker, lease_ttl_ms),
        *(orphan.entry_id, orphan.attempt, orphan.deaths, orphan.fruitless, MAX_CHOICES),
        *(secrets.token_hex(8), retention_ms, orphan_wait_ms, int(inference_pb2.ERROR)),
        encode_terminal(request_id, inference_pb2.ERROR, job_pb2.FAILURE_UNAVAILABLE, late),
        encode_terminal(request_id, inference_pb2.ERROR, job_pb2.FAILURE_DEAD, orphan.verdict) if record else b"",
        *(record, most_kept(record), DEAD_TTL_MS),
    ]
    if target is not None:
        names += [
            *(keys.worker(target.worker), keys.jobs(target.worker)),
            *(keys.load(target.worker, target.incarnation), keys.suspect(target.worker)),
        ]
        args += [target.worker, target.incarnation, max(target.prefill, 0), max(target.predicted, 0)]
        args += [_MARK_TTL_MS, ALONE_DEATHS]
    return Rehomed((await broker.script("rehome", names, args)).decode())


def _dead_job(orphan: Orphan, job: job_pb2.Job) -> bytes:
    return job_pb2.DeadJob(
        job=job,
        reason=orphan.verdict,
        attempts=orphan.attempt,
        worker=orphan.worker,
        died_unix_ms=orphan.seen_ms,
    ).SerializeToString()
