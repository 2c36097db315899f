"""What the service makes of requests and deliveries. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Final

from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.dispatch import Sent
    from octavo.v1 import job_pb2


BY_ITSELF: Final = (inference_pb2.STOP, inference_pb2.LENGTH)
"""How an answer ends that is whole."""


def digest_of(request: inference_pb2.GenerateRequest) -> bytes:
    """SHA-256 of all that the client asked for: how it calls the request, and itself, aside."""
    # Taken out and put back: a copy of the request may be megabytes.
    request_id, caller = request.request_id, request.caller
    request.request_id = request.caller = ""
    try:
        return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
    finally:
        request.request_id, request.caller = request_id, caller


def seed_of(request_id: str, digest: bytes) -> int:
    """The seed of a request that sets none, 0 to 2^64 - 1: by its id, so that whoever submits it again, once the broker
    has lost it, gets the same answer. The ids that gateways make are random."""
    return int.from_bytes(hashlib.sha256(b"octavo seed" + digest + request_id.encode()).digest()[:8])


def response_of(
    request_id: str, batch: list[job_pb2.Delivery], sent: Sent, usage: inference_pb2.Usage | None
) -> inference_pb2.GenerateResponse:
    """One response for consecutive deliveries. `sent`: where the job was sent, for a route that does not say it.
    `usage`: of the whole job, with the last response."""
    chunks = [delivery.chunk for delivery in batch]
    response = inference_pb2.GenerateResponse(request_id=request_id, chunks=chunks, usage=usage)
    for delivery in batch:
        if delivery.HasField("route"):
            response.route.CopyFrom(delivery.route)
            response.route.worker = delivery.route.worker or sent.worker
    return response


def most_tokens(chunks: Sequence[inference_pb2.Chunk]) -> int:
    """Of the choices that these chunks are of, how many tokens one gets at most."""
    if len(chunks) == 1:  # nearly always
        return len(chunks[0].token_ids)
    counts: Counter[int] = Counter()
    for chunk in chunks:
        counts[chunk.choice] += len(chunk.token_ids)
    return max(counts.values(), default=0)
