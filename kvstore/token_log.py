"""The token log: everything a job has produced, in order, and the bytes that carry it.

The log is the truth about a job's output. What is published says the same sooner, and may be lost.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvstore.errors import MalformedValue
from kvstore.logs import about
from octavo.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.client import Broker
    from octavo.v1 import inference_pb2

logger = logging.getLogger(__name__)

FIELD = b"d"
"""Field of a log entry: octavo.v1.Deliveries with one delivery."""

MAX_BYTES = 16 * 2**20
"""Longest encoding that is looked at. A chunk takes a few hundred bytes, and 1.5 MB at most: with the log-probabilities
of a whole prompt."""

MAX_PUBLISHED = 8 * 2**20
"""Bytes that are published together, at most; a single delivery may be longer."""

PAGE = 512
"""Entries that are read at once."""


def encode(deliveries: Iterable[job_pb2.Delivery]) -> bytes:
    """octavo.v1.Deliveries. Concatenated encodings decode to the concatenated lists."""
    return job_pb2.Deliveries(deliveries=deliveries).SerializeToString()


def encode_terminal(
    request_id: str,
    finish: inference_pb2.FinishReason,
    failure: job_pb2.Failure,
    error: str,
    *,
    abandoned: bool = False,
) -> bytes:
    """The last delivery of a job that is ended from outside: attempt 0, start 0, no usage. It ends every choice that is
    still open; its reader completes it from ``Jobs.get``."""
    delivery = job_pb2.Delivery(request_id=request_id, failure=failure)
    delivery.chunk.finish = finish
    delivery.chunk.error = error
    delivery.chunk.abandoned = abandoned
    return encode([delivery])


def decode(data: bytes) -> list[job_pb2.Delivery]:
    """Inverse of ``encode``. Raises MalformedValue for anything else, over-long values included."""
    if len(data) > MAX_BYTES:
        raise MalformedValue(f"{len(data)} bytes where deliveries were expected, more than {MAX_BYTES}")
    try:
        deliveries = list(job_pb2.Deliveries.FromString(data).deliveries)
    except DecodeError as error:
        raise MalformedValue(f"{len(data)} bytes that are no deliveries") from error
    for delivery in deliveries:
        if not delivery.request_id or not delivery.HasField("chunk"):
            raise MalformedValue("a delivery without request id or chunk")
    return deliveries


def decode_or_count(broker: Broker, data: bytes) -> list[job_pb2.Delivery]:
    """As ``decode``; what does not parse is counted in ``broker.malformed`` and gives an empty list."""
    try:
        return decode(data)
    except MalformedValue as error:
        broker.malformed += 1
        logger.debug("skipped: %s", error)
        return []


async def read(broker: Broker, request_id: str, last_id: bytes = b"0") -> tuple[list[job_pb2.Delivery], bytes]:
    """All that the log holds after the entry ``last_id``, in order, and the id to go on from. Raises as
    ``read_page``."""
    deliveries: list[job_pb2.Delivery] = []
    more = True
    while more:
        page, last_id, more = await read_page(broker, request_id, last_id)
        deliveries += page
    return deliveries, last_id


async def read_page(broker: Broker, request_id: str, last_id: bytes) -> tuple[list[job_pb2.Delivery], bytes, bool]:
    """What the next PAGE entries after ``last_id`` hold, in order, the id to go on from, and whether there may be more.

    Entries that do not parse, or name another request, are skipped and counted in ``broker.malformed``. Raises
    BrokerError.
    """
    key = broker.keys.log(request_id)
    deliveries: list[job_pb2.Delivery] = []
    page: list[tuple[bytes, dict[bytes, bytes] | None]] = await broker.call(
        "XRANGE", key, b"(" + last_id, "+", "COUNT", PAGE
    )
    for entry_id, fields in page:
        last_id = entry_id
        try:
            deliveries.append(_only(decode((fields or {}).get(FIELD, b"")), request_id))
        except MalformedValue as error:
            broker.malformed += 1
            logger.debug("skipped %s of %s: %s", entry_id, key, error, extra=about(request_id))
    return deliveries, last_id, len(page) == PAGE


def _only(found: list[job_pb2.Delivery], request_id: str) -> job_pb2.Delivery:
    if [delivery.request_id for delivery in found] != [request_id]:
        raise MalformedValue(f"{len(found)} deliveries, not one for its own request")
    return found[0]
