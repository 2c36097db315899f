"""A gateway by TLS: callers who trust its authority get in, with certificates of their own where it asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner

from gateway import client as product
from gateway.access import OPEN, Access
from gateway.config import TransportError
from ops import health
from ops.client import Client, describe
from ops.reach import Target
from tests.integration.gateway.harness import request, running_gateway, tokens
from tests.support.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker
    from tests.integration.gateway.scripted import ScriptedWorker
    from tests.support.certificates import Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.sign("gateway")


@pytest.fixture(scope="module")
def trusting(authority: Authority) -> Access:
    """A client that trusts the gateway's authority."""
    return Access(tls=True, ca=authority.certificate.read_bytes())


@pytest.fixture(scope="module")
def certified(authority: Authority) -> Access:
    """And has a certificate by it."""
    pair = authority.sign("client")
    files = (each.read_bytes() for each in (authority.certificate, pair.certificate, pair.key))
    return Access(True, *files)


async def trouble(target: str, access: Access) -> str:
    """What a command says that can't get through."""
    async with Client(Target(target, access)) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.model()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return describe(caught.value)


async def test_answers_come_by_tls(broker: Broker, worker: ScriptedWorker, server: Pair, trusting: Access) -> None:
    worker.serve()
    files = {"tls_cert": str(server.certificate), "tls_key": str(server.key)}
    async with running_gateway(broker, **files) as (_, ready, _):
        async with product.Client([ready.grpc], access=trusting) as client:
            assert tokens([each async for each in client.generate(request(), timeout=20)]) == [2, 3, 4]
        async with Client(Target(ready.grpc, trusting)) as commands:
            assert await commands.serves()
            assert [each.id for each in await commands.workers()] == ["w0"]
        assert "it hangs up at once: it may want TLS (--tls-ca)" in await trouble(ready.grpc, OPEN)
        stranger = Access(tls=True)  # trusts what the library trusts
        assert "its certificate is not signed by what --tls-ca trusts" in await trouble(ready.grpc, stranger)


async def test_certificates_are_renewed_without_a_restart(
    broker: Broker, worker: ScriptedWorker, tmp_path: Path, authority: Authority, trusting: Access
) -> None:
    pair, other = authority.sign("old"), Authority(tmp_path)
    files = {"tls_cert": str(pair.certificate), "tls_key": str(pair.key)}
    async with running_gateway(broker, **files) as (_, ready, _):
        async with Client(Target(ready.grpc, trusting)) as before:
            assert (await before.model()).name == "tiny"
            new = other.sign("new")
            new.certificate.replace(pair.certificate)
            new.key.replace(pair.key)
            async with Client(Target(ready.grpc, Access(tls=True, ca=other.certificate.read_bytes()))) as client:
                assert (await client.model()).name == "tiny"
            assert (await before.model()).name == "tiny"  # who is in stays in
        assert "its certificate is not signed" in await trouble(ready.grpc, trusting)


async def test_who_has_no_certificate_stays_outside(
    broker: Broker, worker: ScriptedWorker, authority: Authority, server: Pair, trusting: Access, certified: Access
) -> None:
    files = {
        "tls_cert": str(server.certificate),
        "tls_key": str(server.key),
        "tls_client_ca": str(authority.certificate),
    }
    async with running_gateway(broker, **files) as (_, ready, _):
        async with Client(Target(ready.grpc, certified)) as client:
            assert (await client.model()).name == "tiny"
        assert "or a certificate as well (--tls-cert)" in await trouble(ready.grpc, trusting)
        await trouble(ready.grpc, OPEN)


async def test_a_client_by_tls_says_that_a_gateway_speaks_none(broker: Broker, trusting: Access) -> None:
    async with running_gateway(broker) as (_, ready, _):
        assert "what answers there speaks no TLS: leave out --tls-ca" in await trouble(ready.grpc, trusting)


async def test_a_gateway_that_is_open_to_all_does_not_start(broker: Broker) -> None:
    with pytest.raises(TransportError, match=r"--host 0.0.0.0 can be reached from other machines"):
        async with running_gateway(broker, host="0.0.0.0"):
            pass
    async with running_gateway(broker, host="0.0.0.0", insecure=True):
        pass


def test_health_is_asked_by_tls_too(authority: Authority) -> None:
    result = CliRunner().invoke(health.command, ["--target", "127.0.0.1:1", "--tls-ca", str(authority.certificate)])
    assert result.exit_code == 1
    assert "UNAVAILABLE: nothing answers there" in result.stderr
