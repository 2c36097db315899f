"""What one gateway process is told, read once at its start."""

from __future__ import annotations

from dataclasses import dataclass

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest request message. gRPC refuses a bigger one with RESOURCE_EXHAUSTED before any of our code runs. Large enough
for a prompt of a million token ids; a client may keep gRPC's default limits."""

MAX_RESPONSE_BYTES = 4 * 1024 * 1024
"""Largest response message, and gRPC's default for what a client takes. Ours stay below: a response carries at most
``gateway.relay.MAX_BATCH`` chunks of a few hundred bytes. One chunk of a call may be larger: the log-probabilities of a
prompt take up to 1.5 MB (``gateway.admission.MAX_PROMPT_LOGPROBS``)."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of a gateway.

    `grpc_port` and `metrics_port` 0 let the system choose; the `ready` line tells the result. `max_queue` bounds the
    jobs of one worker that have not ended, `max_streams` the Generate calls of this gateway. `grace_s` is how long
    streams may go on after SIGTERM, in seconds.
    """

    redis: str
    namespace: str = "default"
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    metrics_port: int = 0
    max_queue: int = 64
    max_streams: int = 1024
    grace_s: float = 30.0
    tokenizer_threads: int = 2


def address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
