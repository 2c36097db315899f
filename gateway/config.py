"""What one gateway process is told, read once at its start."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from kvstore.logs import TEXT
from kvstore.page_store import TTL_S

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest request message: large enough for a prompt of a million token ids. A bigger one is refused by
``gateway.rpc.parse``, which says so in words."""

MAX_MESSAGE_BYTES = 2 * MAX_REQUEST_BYTES
"""Largest message that is received at all: gRPC itself refuses a bigger one, with RESOURCE_EXHAUSTED and words of its
own."""

MAX_BODY_BYTES = 2 * MAX_REQUEST_BYTES
"""Largest body of an HTTP request: JSON takes up to seven bytes for a token id that the request message has in
three."""

MAX_RESPONSE_BYTES = 4 * 1024 * 1024
"""Largest response message, and gRPC's default for what a client takes. Ours stay below: a response carries at most
``gateway.stream.MAX_BATCH`` chunks of some hundred bytes. One chunk of a call may be larger: the log-probabilities of a
prompt take up to 1.5 MB (``gateway.admission.MAX_PROMPT_LOGPROBS``)."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of a gateway.

    `grpc_port`, `metrics_port` and `http_port` 0 let the system choose; the `ready` line tells the result. Without an
    `http_port` there is no HTTP, and without a folder of `batches`, which workers of batches share, no /v1/files and
    /v1/batches. With `reuse_port` other gateways that have it too may listen on the same gRPC and HTTP ports: the
    system hands each connection to one of them. `max_queue` bounds the
    jobs of one worker that have not ended, `max_streams` the Generate calls of this gateway. `policy` says how workers
    are chosen (``gateway.router``). `pages` says where workers keep pages (none, redis or dir:PATH), `pages_redis` is
    the URL of a server for them, if it is not the broker's, and `pages_ttl` after how many seconds without use workers
    forget one. `grace_s` is how long streams may go on after SIGTERM, in
    seconds. `log_format` is one of ``kvstore.logs.FORMATS``, `otlp` the URL of the collector that gets traces, if there
    is one. `keys` says where API keys are (a file, or `redis`; empty: none are in use). `tls_cert`, `tls_key` and
    `tls_client_ca` are PEM files; with the last, clients need certificates too. `insecure` allows to listen without
    keys and TLS where other machines can reach it.
    """

    redis: str
    namespace: str = "default"
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    metrics_port: int = 0
    http_port: int | None = None
    batches: str = ""
    reuse_port: bool = False
    max_queue: int = 64
    policy: str = "prefix"
    pages: str = "none"
    pages_redis: str = ""
    pages_ttl: float = TTL_S
    max_streams: int = 1024
    grace_s: float = 30.0
    tokenizer_threads: int = 2
    log_format: str = TEXT
    otlp: str = ""
    keys: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    insecure: bool = False


class TransportError(RuntimeError):
    """A gateway can't listen as it was told to; the message says which option to change."""


class PortError(OSError):
    """A port can't be listened on; the message says which option to change."""


def require_port(host: str, port: int, option: str, *, reuse: bool = False) -> None:
    """Raises PortError when no address of `host` can be listened on at `port`. 0, for any free one, always can. With
    `reuse` a port will do that others share in the same way.

    gRPC only says that it failed, not why, and prints lines of its own about it.
    """
    failure: OSError | None = None
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                # As servers do: a port whose last user has ended is free at once.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if reuse:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                try:
                    probe.bind(where)
                except OSError as error:
                    failure = error
                else:
                    return
    except OSError as error:  # the host has no address, or the machine no such kind of addresses
        failure = error
    if failure is not None:
        hint = f"choose another port with {option}, or any free one with {option} 0"
        if failure.errno != errno.EADDRINUSE:
            hint = f"see --host and {option}"
        raise PortError(f"cannot listen on {address(host, port)}: {failure.strerror or failure}; {hint}")


def address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
