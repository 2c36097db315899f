"""Ports that gateways share, kept by who starts them."""

from __future__ import annotations

import socket

import click
import pytest

from gateway.config import PortError, require_port
from ops.config import FleetConfig
from ops.ports import shared

HOST = "127.0.0.1"


def test_who_shares_nothing_holds_nothing() -> None:
    config = FleetConfig(gateways=2, grpc_port=0)
    assert shared(config, HOST) == (config, [])


def test_ports_left_to_the_system_are_chosen_once_and_only_sharers_get_them() -> None:
    config, held = shared(FleetConfig(gateways=3, one_port=True, grpc_port=0, http_port=0), HOST)
    ports = [each.getsockname()[1] for each in held]
    try:
        assert [config.grpc_port, config.http_port] == ports
        assert 0 not in ports
        assert len(set(ports)) == 2
        for port in ports:
            with pytest.raises(PortError, match="Address already in use"):
                require_port(HOST, port, "--grpc-port")
            require_port(HOST, port, "--grpc-port", reuse=True)
            with pytest.raises(ConnectionRefusedError):  # held, and not listened on
                socket.create_connection((HOST, port))
    finally:
        for each in held:
            each.close()


def test_a_port_that_others_have_is_told_and_nothing_stays_held() -> None:
    with socket.socket() as free, socket.socket() as taken:
        free.bind((HOST, 0))
        grpc = free.getsockname()[1]
        free.close()
        taken.bind((HOST, 0))
        http = taken.getsockname()[1]
        with pytest.raises(click.ClickException) as refused:
            shared(FleetConfig(one_port=True, grpc_port=grpc, http_port=http), HOST)
    assert refused.value.message == f"cannot share port {http} of {HOST}: Address already in use; see --http-port"
    require_port(HOST, grpc, "--grpc-port")


def test_a_port_whose_last_user_has_just_ended_can_be_shared() -> None:
    with socket.create_server((HOST, 0)) as server:  # which shares it with nobody
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # first: it is this end that the system remembers for a while
            assert client.recv(1) == b""
    config, held = shared(FleetConfig(one_port=True, grpc_port=port), HOST)
    with held[0]:
        assert config.grpc_port == port
        require_port(HOST, port, "--grpc-port", reuse=True)


def test_gateways_that_share_are_all_told_the_same_ports() -> None:
    config = FleetConfig(gateways=2, one_port=True, grpc_port=6000, http_port=8000, metrics_port=9100)
    for index in range(2):
        told = config.gateway_arguments(index)
        assert "--reuse-port" in told
        assert told[told.index("--grpc-port") + 1] == "6000"
        assert told[told.index("--http-port") + 1] == "8000"
        assert told[told.index("--metrics-port") + 1] == str(9100 + index)
    assert "--reuse-port" not in FleetConfig(gateways=2).gateway_arguments(0)
