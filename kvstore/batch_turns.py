"""Whose batch runs next, as few can run at once: tenants take turns, and of one tenant's batches the oldest goes first.

A batch that has had its turn, or waits for something, gives way to those of other tenants, and waits in the queue as
they did. Before a worker takes a job it puts the one first whose turn it is: rq takes jobs in the order of its list.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import MalformedValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rq import Queue

    from kvstore.batches import BatchStore

KNOWN_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Waiting:
    """A batch in the queue."""

    id: str
    tenant: str
    created_ms: int


def next_up(waiting: Iterable[Waiting], turns: Mapping[str, float]) -> str | None:
    """The id of the batch that goes first: the oldest of the tenant whose last turn began the longest ago, as `turns`
    tells; who is not in it had none. None: no batch waits."""
    first = min(waiting, key=lambda each: (turns.get(each.tenant, 0), each.created_ms, each.id), default=None)
    return first.id if first is not None else None


def note(store: BatchStore, tenant: str) -> None:
    """A batch of a tenant has its turn, or had it. That is known for a day, or until the broker has lost it: who goes
    first depends on it, and nothing else. Raises BrokerError."""
    name = store.keys.batch_turns
    with store.translated():
        now: Any = store.redis.time()
        store.redis.zadd(name, {tenant: now[0] + now[1] / 1e6})
        store.redis.zremrangebyscore(name, 0, now[0] - KNOWN_S)
        store.redis.expire(name, KNOWN_S)


def arrange(store: BatchStore, queue: Queue) -> None:
    """Puts the job of the batch first whose turn it is. Raises BrokerError."""
    with store.translated():
        ids = queue.get_job_ids()
    if len(ids) < 2:
        return
    with store.translated():
        turns: Any = store.redis.zrange(store.keys.batch_turns, 0, -1, withscores=True)
    first = next_up(_waiting(store, ids), {tenant.decode(): begun_s for tenant, begun_s in turns})
    if first not in (None, ids[0]):
        store.script("batch_first", [queue.key], [first])


def others_wait(store: BatchStore, queue: Queue, tenant: str) -> bool:
    """Whether an open batch of somebody else is run by no worker: it is in the queue, came by HTTP and has no job yet,
    or its worker died, and whoever is free will find it. Raises BrokerError."""
    with store.translated():
        now_s = time.time()  # rq's clock: that of whoever renews an execution
        running: Any = store.redis.zrangebyscore(queue.started_job_registry.key, now_s, "+inf")
    taken = {execution.decode().partition(":")[0] for execution in running}
    return any(
        each.tenant != tenant for each in _waiting(store, [each for each in store.open_ids() if each not in taken])
    )


def _waiting(store: BatchStore, ids: list[str]) -> list[Waiting]:
    """Of jobs whose batch is unknown nothing is told: whoever takes one finds nothing to do."""
    with store.translated(), store.redis.pipeline(transaction=False) as pipeline:
        for each in ids:
            pipeline.hmget(store.keys.batch(each), ["tenant", "created_ms"])
        found: list[Any] = pipeline.execute()
    try:
        return [
            Waiting(batch_id, json.loads(tenant or b'""'), int(created_ms))
            for batch_id, (tenant, created_ms) in zip(ids, found, strict=True)
            if created_ms
        ]
    except ValueError as error:
        raise MalformedValue(f"a batch that waits: {error}") from error
