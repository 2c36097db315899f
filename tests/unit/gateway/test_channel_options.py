"""gRPC ignores an option that it does not know, without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from gateway import client, server
from ops import client as operators

LIBRARY = Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize(
    "options", [server.OPTIONS, client.OPTIONS, operators.OPTIONS], ids=["server", "client", "ops"]
)
def test_grpc_knows_every_option(options: tuple[tuple[str, int], ...]) -> None:
    assert [name for name, _ in options if name.encode() + b"\0" not in LIBRARY] == []


def test_what_it_does_not_know_is_found() -> None:
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in LIBRARY


def test_clients_ping_no_more_often_than_gateways_allow() -> None:
    """Who pings more often than this is hung up on once it has waited for a while."""
    allowed = dict(server.OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    assert dict(client.OPTIONS)["grpc.keepalive_time_ms"] >= 2 * allowed
