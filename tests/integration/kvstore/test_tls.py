"""A broker by TLS, as its URL says."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.doorbell import Doorbell
from kvstore.embedded import EmbeddedBroker
from kvstore.errors import BrokerUnreachable
from tests.integration.conftest import server_binary
from tests.support.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_broker_by_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, own, stranger = authority.sign("redis"), authority.sign("octavo"), Authority(tmp_path, "stranger")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "tls-port": str(port),
        "tls-cert-file": str(pair.certificate),
        "tls-key-file": str(pair.key),
        "tls-ca-cert-file": str(authority.certificate),
    }
    async with EmbeddedBroker(binary=server_binary("redis"), options=options):
        base = f"rediss://127.0.0.1:{port}/0"
        client = f"ssl_certfile={own.certificate}&ssl_keyfile={own.key}"
        broker = await connect(BrokerConfig(f"{base}?ssl_ca_certs={authority.certificate}&{client}"))
        bell = Doorbell(broker)
        await bell.open(broker.keys.channel("i"))
        assert await broker.call("PUBLISH", broker.keys.channel("i"), "r1") == 1
        async for payload in bell:
            assert payload == b"r1"
            break
        await bell.close()
        await broker.close()
        for url in (
            f"{base}?ssl_ca_certs={stranger.certificate}&{client}",  # not the server's authority
            f"{base}?{client}",
            f"{base}?ssl_ca_certs={authority.certificate}",  # the server asks for a certificate
            base.replace("rediss:", "redis:"),
        ):
            with pytest.raises(BrokerUnreachable):
                await connect(BrokerConfig(url, connect_patience_s=0.1))
