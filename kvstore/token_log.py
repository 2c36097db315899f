"""The token log: everything a job has produced, in order, and the bytes that carry it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.v1 import job_pb2

    from kvstore.client import Broker


def encode(deliveries: Iterable[job_pb2.Delivery]) -> bytes:
    """octavo.v1.Deliveries. Concatenated encodings decode to the concatenated lists."""
    raise NotImplementedError


def decode(data: bytes) -> list[job_pb2.Delivery]:
    """Inverse of ``encode``. Raises MalformedValue for anything else, over-long values included."""
    raise NotImplementedError


def decode_or_count(broker: Broker, data: bytes) -> list[job_pb2.Delivery]:
    """As ``decode``; what does not parse is counted in ``broker.malformed`` and gives an empty list."""
    raise NotImplementedError


async def read(broker: Broker, request_id: str, last_id: bytes = b"0") -> tuple[list[job_pb2.Delivery], bytes]:
    """What the log holds after the entry ``last_id``, in order, and the id to go on from.

    Entries that do not parse, or name another request, are skipped and counted in ``broker.malformed``. Raises
    BrokerError.
    """
    raise NotImplementedError
