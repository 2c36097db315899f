"""HTTP by TLS: with the certificates that gRPC has, and with callers' own where they are asked for."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from gateway.http import server as http_server
from tests.integration.gateway.harness import running_gateway
from tests.integration.gateway.http_client import HttpClient
from tests.support.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker
    from tests.integration.gateway.scripted import ScriptedWorker
    from tests.support.certificates import Pair

ASKED: Any = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.sign("gateway")


def listening(pair: Pair, client_ca: Path | None = None) -> dict[str, Any]:
    files = {"tls_cert": str(pair.certificate), "tls_key": str(pair.key), "http_port": 0}
    return files | ({"tls_client_ca": str(client_ca)} if client_ca else {})


def trusting(authority: Authority, own: Pair | None = None) -> ssl.SSLContext:
    """A client that trusts an authority, and may have a certificate of its own."""
    context = ssl.create_default_context(cafile=authority.certificate)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


async def test_answers_come_by_tls(broker: Broker, worker: ScriptedWorker, authority: Authority, server: Pair) -> None:
    worker.serve()
    async with running_gateway(broker, **listening(server)) as (gateway, ready, _):
        async with HttpClient(gateway, ready, tls=trusting(authority)) as client:
            assert (await client.openai.completions.create(**ASKED)).choices[0].text == "<2><3><4>"
            stream = await client.openai.completions.create(**ASKED, stream=True)
            assert "".join([each.choices[0].text async for each in stream]) == "<2><3><4>"
            assert (await client.plain.get("/health")).status_code == 200
        async with HttpClient(gateway, ready) as plain:
            for path in ("/health", "/v1/models"):
                with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
                    await plain.plain.get(path)
        async with HttpClient(gateway, ready, tls=ssl.create_default_context()) as stranger:
            with pytest.raises(openai.APIConnectionError) as caught:
                await stranger.openai.models.list()
            assert "CERTIFICATE_VERIFY_FAILED" in str(caught.value.__cause__)


async def test_who_has_no_certificate_stays_outside(
    broker: Broker, worker: ScriptedWorker, authority: Authority, server: Pair, tmp_path: Path
) -> None:
    others = Authority(tmp_path)
    async with running_gateway(broker, **listening(server, authority.certificate)) as (gateway, ready, _):
        async with HttpClient(gateway, ready, tls=trusting(authority, authority.sign("client"))) as client:
            assert [each.id async for each in client.openai.models.list()] == ["tiny"]
        for own in (None, others.sign("client")):
            async with HttpClient(gateway, ready, tls=trusting(authority, own)) as client:
                # By TLS 1.3 a client learns of it only when it reads.
                with pytest.raises((httpx2.ReadError, httpx2.ConnectError, httpx2.RemoteProtocolError)):
                    await client.plain.get("/health")


async def test_certificates_are_renewed_without_a_restart(
    broker: Broker, worker: ScriptedWorker, tmp_path: Path, authority: Authority
) -> None:
    """Those of who may call, too."""
    pair, other, callers = authority.sign("old"), Authority(tmp_path), tmp_path / "callers.pem"
    callers.write_bytes(authority.certificate.read_bytes())
    old, new = authority.sign("old client"), other.sign("new client")
    async with running_gateway(broker, **listening(pair, callers)) as (gateway, ready, _):
        async with HttpClient(gateway, ready, tls=trusting(authority, old)) as before:
            assert (await before.plain.get("/v1/models")).status_code == 200
            made = other.sign("new")
            made.certificate.replace(pair.certificate)
            made.key.replace(pair.key)
            callers.write_bytes(other.certificate.read_bytes())
            async with HttpClient(gateway, ready, tls=trusting(other, new)) as client:
                assert (await client.plain.get("/v1/models")).status_code == 200
            async with HttpClient(gateway, ready, tls=trusting(other, old)) as client:
                with pytest.raises((httpx2.ReadError, httpx2.ConnectError, httpx2.RemoteProtocolError)):
                    await client.plain.get("/v1/models")
            assert (await before.plain.get("/v1/models")).status_code == 200  # who is in stays in
        async with HttpClient(gateway, ready, tls=trusting(authority, old)) as client:
            with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.plain.get("/v1/models")


async def test_who_never_shakes_hands_is_let_go(broker: Broker, server: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    async with running_gateway(broker, **listening(server)) as (_, ready, _):
        assert ready.http is not None
        host, _, port = ready.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
