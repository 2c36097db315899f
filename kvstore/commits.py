"""Writing what a worker's steps produced."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from kvstore.endings import end_damaged
from kvstore.errors import CommitGap
from kvstore.keys import GROUP
from kvstore.ledger import outcome
from kvstore.limits import MAX_CHOICES
from kvstore.prefix_index import batches as held_batches
from kvstore.records import Commit, Committed
from kvstore.token_log import MAX_PUBLISHED, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.client import Broker
    from kvstore.prefix_index import HeldChange
    from octavo.v1 import job_pb2

# In the order of the codes in commit.lua.
_OUTCOMES = (Commit.WRITTEN, Commit.DUPLICATE, Commit.FENCED)


async def commit(
    broker: Broker,
    worker: str,
    incarnation: str,
    *,
    retention_ms: int,
    held_ttl_ms: int,
    deliveries: Sequence[job_pb2.Delivery],
    held: HeldChange | None,
    entries: Sequence[str],
) -> Committed:
    """See ``Jobs.commit``."""
    for delivery in deliveries:
        if not delivery.chunk.token_ids and not delivery.chunk.finish:
            # It could not be told from its own repetition.
            raise ValueError(f"request {delivery.request_id}: a chunk with neither tokens nor finish")
    keys = broker.keys
    answers: list[Any] = []
    claimed_by = iter(entries)
    count: int | None = None
    for batch, (added, removed) in calls(deliveries, held):
        names = [keys.jobs(worker), keys.load(worker, incarnation), keys.held(worker, incarnation)]
        args: list[Any] = [GROUP, incarnation, keys.channel(""), retention_ms, added, removed, held_ttl_ms, MAX_CHOICES]
        for delivery, data in batch:
            names += [keys.job(delivery.request_id), keys.log(delivery.request_id)]
            args += (described(delivery, next(claimed_by, "")), data)
        count, *some = await broker.script("commit", names, args)
        answers += some
    gaps: dict[str, dict[int, int]] = defaultdict(dict)
    outcomes: list[Commit] = []
    for delivery, answer in zip(deliveries, answers, strict=True):
        match answer:
            case [next_index]:
                gaps[delivery.request_id][delivery.chunk.choice] = int(next_index)
            case [field, value]:
                reason = f"its field {field.decode()} is {value!r:.40}"
                await end_damaged(
                    broker, delivery.request_id, reason, retention_ms=retention_ms, expect_attempt=delivery.attempt
                )
                outcomes.append(Commit.FENCED)
            case code:
                outcomes.append(_OUTCOMES[code])
    if gaps:
        raise CommitGap(gaps)
    return Committed(outcomes, count)


def calls(
    deliveries: Sequence[job_pb2.Delivery], held: HeldChange | None
) -> Iterator[tuple[list[tuple[job_pb2.Delivery, bytes]], tuple[bytes, bytes]]]:
    """What goes into each script call: deliveries, and hashes added and removed. One, unless there are megabytes of
    deliveries or thousands of hashes; none for nothing."""
    changes: list[tuple[bytes, bytes]] = []
    if held is not None:
        changes = list(zip_longest(held_batches(held.added), held_batches(held.removed), fillvalue=b""))
        # What is not a change still asks for the number.
        changes = changes or [(b"", b"")]
    for batch, change in zip_longest(batches(deliveries), changes):
        yield batch or [], change or (b"", b"")


def batches(deliveries: Sequence[job_pb2.Delivery]) -> Iterator[list[tuple[job_pb2.Delivery, bytes]]]:
    """All of them in one, unless what a gateway gets in one message would be too long."""
    batch: list[tuple[job_pb2.Delivery, bytes]] = []
    size = 0
    for delivery in deliveries:
        data = encode([delivery])
        if batch and size + len(data) > MAX_PUBLISHED:
            yield batch
            batch, size = [], 0
        batch.append((delivery, data))
        size += len(data)
    if batch:
        yield batch


def described(delivery: job_pb2.Delivery, entry: str) -> str:
    """A delivery as commit.lua takes it, which does not know protobuf, and its job's entry. One text, for each argument
    of a script costs its caller more than all that is told here."""
    chunk = delivery.chunk
    place = f"{delivery.attempt} {chunk.choice} {chunk.start} {chunk.start + len(chunk.token_ids)} {entry}"
    told = delivery.HasField("route")
    if not told and not chunk.finish:
        return place
    found = f"{delivery.route.cached_tokens} {delivery.route.fetched_tokens}" if told else " "
    ended = outcome(chunk.finish, delivery.failure) if chunk.finish else ""
    return f"{place} {chunk.finish} {ended} {found}"
