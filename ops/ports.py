"""Ports that the gateways of one fleet share."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ops.config import FleetConfig


def shared(config: FleetConfig, host: str) -> tuple[FleetConfig, list[socket.socket]]:
    """The same fleet with its gateways' ports chosen, where they share them and left the choice to the system; and what
    keeps these ports for them until it is closed, also while no gateway lives.

    Raises:
        click.ClickException: a port can't be had.
    """
    if not config.one_port:
        return config, []
    held: list[socket.socket] = []

    def chosen(port: int, option: str) -> int:
        try:
            held.append(held_port(host, port))
        except OSError as error:
            for each in held:
                each.close()
            raise click.ClickException(f"cannot share port {port} of {host}: {error.strerror}; see {option}") from error
        return int(held[-1].getsockname()[1])

    grpc_port = chosen(config.grpc_port, "--grpc-port")
    http_port = None if config.http_port is None else chosen(config.http_port, "--http-port")
    return replace(config, grpc_port=grpc_port, http_port=http_port), held


def held_port(host: str, port: int) -> socket.socket:
    """A port, 0 for any free one, bound and not listened on: who shares it gets all connections. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    held = socket.socket(family, kind, protocol)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if port:
        # As servers do: a port whose last user has ended is free at once. One that the system chooses has had no user,
        # and without this the system gives it to nobody else.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(where)
    except OSError:
        held.close()
        raise
    return held
