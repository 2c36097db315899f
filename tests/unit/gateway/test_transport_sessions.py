"""Sessions of TLS that outlive whom they were made for."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING

import pytest

from gateway.config import GatewayConfig
from gateway.transport import http_context
from tests.support.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path


class Connection:
    """A client of the server, over memory. Raises SSLError where the server refuses it."""

    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext, session: ssl.SSLSession | None = None) -> None:
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(down, up, server_hostname="localhost", session=session)
        self.server = server.wrap_bio(up, down, server_side=True)
        ends = [self.client.do_handshake, self.server.do_handshake]
        while ends:
            for end in tuple(ends):
                try:
                    end()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    continue
        self.server.write(b"x")
        assert self.client.read(1) == b"x"  # and what a session takes


def test_whom_an_authority_that_went_let_in_does_not_come_back(tmp_path: Path) -> None:
    authority, next_one = Authority(tmp_path), Authority(tmp_path, "next")
    pair, caller = authority.sign("server"), authority.sign("caller")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.certificate.read_bytes())
    config = GatewayConfig(
        "redis://", tls_cert=str(pair.certificate), tls_key=str(pair.key), tls_client_ca=str(trusted)
    )
    server = http_context(config)
    assert server is not None
    client = ssl.create_default_context(cafile=str(authority.certificate))
    client.load_cert_chain(caller.certificate, caller.key)
    first = Connection(client, server)
    again = Connection(client, server, first.client.session)
    trusted.write_bytes(next_one.certificate.read_bytes())
    os.utime(trusted, ns=(1, 1))
    for session in (None, first.client.session, again.client.session):
        with pytest.raises(ssl.SSLError):
            Connection(client, server, session)


def test_sessions_that_can_not_be_turned_off_are_not_begun(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, ca = authority.sign("server"), str(authority.certificate)
    client = ssl.create_default_context(cafile=ca)
    client.load_cert_chain(pair.certificate, pair.key)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    for asked, refused in (("", False), (ca, True)):
        server = http_context(
            GatewayConfig("redis://", tls_cert=str(pair.certificate), tls_key=str(pair.key), tls_client_ca=asked)
        )
        assert server is not None
        if refused:
            with pytest.raises(ssl.SSLError):
                Connection(client, server)
        else:
            Connection(client, server)
