"""Ports that can and can't be listened on."""

from __future__ import annotations

import socket

import pytest

from gateway.config import PortError, address, require_port


def test_an_address_has_an_ipv6_host_in_brackets() -> None:
    assert (address("127.0.0.1", 5), address("::1", 5)) == ("127.0.0.1:5", "[::1]:5")


def test_a_port_that_is_listened_on_is_taken_until_it_is_not() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(PortError) as taken:
            require_port("127.0.0.1", port, "--grpc-port")
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # this end closes first, so the port stays in TIME_WAIT
            assert client.recv(1) == b""
    assert str(taken.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another port with --grpc-port, or any free one with --grpc-port 0"
    )
    require_port("127.0.0.1", port, "--grpc-port")
    require_port("127.0.0.1", 0, "--grpc-port")


def test_a_host_that_is_not_ours_is_told_with_the_option() -> None:
    with pytest.raises(PortError) as elsewhere:
        require_port("192.0.2.1", 0, "--metrics-port")
    assert str(elsewhere.value) == (
        "cannot listen on 192.0.2.1:0: Cannot assign requested address; see --host and --metrics-port"
    )
    with pytest.raises(PortError, match=r"^cannot listen on no such host:1: .*; see --host and --metrics-port$"):
        require_port("no such host", 1, "--metrics-port")
