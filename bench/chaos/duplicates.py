"""Duplicate delivery: a job that somebody runs is handed out once more, as by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import BrokerError
from kvstore.keys import GROUP

if TYPE_CHECKING:
    import random

    from kvstore.client import Broker

STRANGER: Final = "stranger"
"""A consumer that is nobody's incarnation."""


async def duplicate(broker: Broker, numbers: random.Random) -> str:
    """What was done, in words; empty when nobody runs anything. Raises BrokerError.

    One of three: the pending entry is given to another consumer (XCLAIM), the request is put into its worker's stream a
    second time, or into another worker's.
    """
    keys = broker.keys
    workers = sorted(name.decode() for name in await broker.call("ZRANGE", keys.workers, 0, -1))
    pending = [(worker, entry) for worker in workers for entry in await _pending(broker, worker)]
    if not pending:
        return ""
    worker, (entry, request_id) = numbers.choice(pending)
    others = [other for other in workers if other != worker]
    way = numbers.choice(("claim", "again", "elsewhere") if others else ("claim", "again"))
    if way == "claim":
        await broker.call("XCLAIM", keys.jobs(worker), GROUP, STRANGER, 0, entry, "JUSTID", parse_justid=True)
        return f"{request_id}: its entry of {worker} given to another consumer"
    target = worker if way == "again" else numbers.choice(others)
    # NOMKSTREAM: a stream that is gone with its worker must not come back without its group.
    await broker.call("XADD", keys.jobs(target), "NOMKSTREAM", "*", "request", request_id)
    return f"{request_id} of {worker} put into the stream of {target}"


async def _pending(broker: Broker, worker: str) -> list[tuple[bytes, str]]:
    """Entries that the worker has read and not yet ended, with their requests."""
    stream = broker.keys.jobs(worker)
    try:
        details = await broker.call("XPENDING", stream, GROUP, "-", "+", 100, parse_detail=True)
    except BrokerError:
        return []  # no group yet
    found = []
    for each in details:
        for entry, fields in await broker.call("XRANGE", stream, each["message_id"], each["message_id"]):
            found.append((entry, fields[b"request"].decode()))
    return found
