"""Who is refused, and how, by gRPC and by HTTP: a fleet with keys, TLS and users of Redis, line by line (`pytest -s`
prints the lines)."""

from __future__ import annotations

import asyncio
import ssl
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
import httpx2
import pytest

from gateway.access import Access
from gateway.client import retry_after
from kvstore.api_keys import ApiKey, RedisKeys, digest_of, entry_of, limits_of
from kvstore.errors import BrokerAuth
from kvstore.tenants import Quota
from octavo.v1 import fleet_pb2, inference_pb2
from tests.integration.gateway.harness import Client, collect, request, running_gateway
from tests.integration.worker.one_worker import running_worker
from tests.support.certificates import Authority
from tests.support.tiny_model import save_tiny_llama
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

    from gateway.server import Ready
    from tests.integration.deploy.roles import Server
    from tests.support.certificates import Pair

PROMPT = [2 + index % 200 for index in range(100)]
EXPECTED = """
a key that holds                        OK                              200
no key                                  UNAUTHENTICATED                 401 invalid_api_key
a wrong key                             UNAUTHENTICATED                 401 invalid_api_key
a revoked key                           UNAUTHENTICATED                 401 invalid_api_key
no operator, of the whole fleet         PERMISSION_DENIED               403 permission_denied
a prompt that its tenant has sent       96 of 100 cached                96 of 100 cached
a prompt that another tenant has sent   0 of 100 cached                 0 of 100 cached
another tenant's request, to read       NOT_FOUND                       404 unknown_url
another tenant's request, by its id     OK, one of its own              200, one of its own
another tenant's request, to cancel     OK, nothing cancelled           404 unknown_url
a tenant over its limit                 RESOURCE_EXHAUSTED, 60 s        429 rate_limit_exceeded, 60 s
plaintext, where there is TLS           UNAVAILABLE                     no answer
no certificate, where one is needed     UNAVAILABLE                     no answer
a certificate by somebody else          UNAVAILABLE                     no answer
a user of Redis who may not write jobs  UNAVAILABLE                     503 unavailable
""".strip()


class Outside:
    """Somebody who calls a gateway, both ways."""

    def __init__(self, ready: Ready, access: Access, tls: ssl.SSLContext | None) -> None:
        assert ready.http is not None
        self._headers = dict(access.metadata)
        self._grpc = Client(ready.grpc, access)
        base = f"{'https' if tls else 'http'}://{ready.http}"
        self._http = httpx2.AsyncClient(base_url=base, verify=tls or True, trust_env=False, timeout=20)

    async def close(self) -> None:
        await self._grpc.channel.close()
        await self._http.aclose()

    async def generate(self, name: str, prompt: list[int], told: str = "OK") -> str:
        """`told`: what is said of an answer."""
        responses = await collect(self._grpc.generate(request(name, prompt=prompt, max_tokens=2)))
        return told.format(f"{responses[-1].usage.cached_tokens} of {responses[-1].usage.prompt_tokens} cached")

    async def post(self, name: str, prompt: list[int], told: str = "200") -> str:
        body = {"prompt": prompt, "max_tokens": 2}
        response = await self._ask("POST", "/v1/completions", json=body, name=name)
        used = response.json()["usage"]
        return told.format(f"{used['prompt_tokens_details']['cached_tokens']} of {used['prompt_tokens']} cached")

    async def call(self, method: str, message: Any) -> str:
        call = getattr(self._grpc, method)(message)
        answer = await (collect(call) if hasattr(call, "read") else call)
        return "OK, nothing cancelled" if method == "cancel" and not answer.cancelled else "OK"

    async def send(self, method: str, path: str) -> str:
        return str((await self._ask(method, path)).status_code)

    async def _ask(self, method: str, path: str, name: str = "", **more: Any) -> httpx2.Response:
        headers = self._headers | ({"x-request-id": name} if name else {})
        return (await self._http.request(method, path, headers=headers, **more)).raise_for_status()


async def said(call: Awaitable[str]) -> str:
    """What became of it."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        wait = retry_after(error) or 0.0
        return error.code().name + (f", {round(wait, -1):.0f} s" if wait > 5 else "")
    except httpx2.HTTPStatusError as error:
        wait = int(error.response.headers.get("retry-after", 0))
        code = f"{error.response.status_code} {error.response.json()['error']['code']}"
        return code + (f", {round(wait, -1)} s" if wait > 5 else "")
    except httpx2.TransportError:
        return "no answer"


@asynccontextmanager
async def fleet(server: Server, model: Path, folder: Path, authority: Authority) -> AsyncIterator[Ready]:
    """With keys in Redis, and certificates for both ends."""
    pair, gateways = authority.sign("gateway"), server.roles["gateway"]
    settings: dict[str, Any] = {"keys": "redis", "http_port": 0, "tls_client_ca": str(authority.certificate)}
    settings |= {"tls_cert": str(pair.certificate), "tls_key": str(pair.key)}
    keys = RedisKeys(server.roles["operator"])
    for tenant in ("acme", "other", "third", "late", "small"):
        await keys.put(entry_of(ApiKey(digest_of(f"key of {tenant}"), tenant)))
    await keys.put(limits_of("small", Quota(requests_per_minute=1)))
    async with (
        running_worker(server.roles["worker"], model, folder, gateway=gateways),
        running_gateway(gateways, **settings) as (_, ready, _),
    ):
        yield ready


async def test_each_is_refused_with_the_right_code(
    server: Server, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority, others = Authority(tmp_path), Authority(tmp_path_factory.mktemp("others"))
    model = await asyncio.to_thread(save_tiny_llama, tmp_path_factory.mktemp("tiny"))
    async with fleet(server, model, tmp_path, authority) as ready:
        table = Table(ready, authority.certificate, authority.sign("client"), others.sign("client"))
        await callers(table, server)
        await requests(table)
        await connections(table, server)
    lines = "\n".join(table.lines)
    sys.stdout.write(f"\n{lines}\n")
    assert lines == EXPECTED


class Table:
    """Lines, and those who make them."""

    def __init__(self, ready: Ready, ca: Path, ours: Pair, theirs: Pair) -> None:
        self.lines: list[str] = []
        self._ready = ready
        self._ca = ca
        self._pairs = {"ours": ours, "theirs": theirs}

    def outside(self, tenant: str, certificate: str = "ours", *, plain: bool = False) -> Outside:
        """Somebody with a tenant's key; empty: without one. `certificate`: whose; empty: none."""
        key = f"key of {tenant}" if tenant else ""
        if plain:
            return Outside(self._ready, Access(api_key=key), None)
        tls, pair = ssl.create_default_context(cafile=self._ca), self._pairs.get(certificate)
        own = (pair.certificate.read_bytes(), pair.key.read_bytes()) if pair else (None, None)
        if pair is not None:
            tls.load_cert_chain(pair.certificate, pair.key)
        return Outside(self._ready, Access(True, self._ca.read_bytes(), *own, api_key=key), tls)

    async def line(self, what: str, who: Outside, by_grpc: Awaitable[str], by_http: Awaitable[str]) -> None:
        """What becomes of both calls; then `who` leaves."""
        self.lines.append(f"{what:38}  {await said(by_grpc):30}  {await said(by_http)}")
        await who.close()

    async def ask(self, what: str, who: Outside) -> None:
        """The same for a small prompt."""
        await self.line(what, who, who.generate("", [5, 6]), who.post("", [5, 6]))


async def callers(table: Table, server: Server) -> None:
    """By their keys."""
    await table.ask("a key that holds", table.outside("acme"))
    await table.ask("no key", table.outside(""))
    await table.ask("a wrong key", table.outside("nobody"))
    who = table.outside("late")
    assert await who.generate("", [5]) == "OK"
    await RedisKeys(server.roles["operator"]).put({digest_of("key of late"): None})

    async def revoked() -> bool:
        return await said(who.call("get_model", inference_pb2.GetModelRequest())) == "UNAUTHENTICATED"

    await until(revoked, within_s=5)
    await table.ask("a revoked key", who)
    who = table.outside("acme")
    by_grpc = who.call("list_workers", fleet_pb2.ListWorkersRequest())
    await table.line("no operator, of the whole fleet", who, by_grpc, who.send("GET", "/metrics"))


async def requests(table: Table) -> None:
    """By whose requests they are about."""
    who = table.outside("acme")
    for name in ("r1", "r2", "r3"):
        await who.generate(name, PROMPT)
    by_grpc, by_http = who.generate("", PROMPT, "{}"), who.post("", PROMPT, "{}")
    await table.line("a prompt that its tenant has sent", who, by_grpc, by_http)
    who, third = table.outside("other"), table.outside("third")
    by_grpc, by_http = who.generate("", PROMPT, "{}"), third.post("", PROMPT, "{}")
    await table.line("a prompt that another tenant has sent", who, by_grpc, by_http)
    await third.close()
    who = table.outside("other")
    by_grpc = who.call("attach", inference_pb2.AttachRequest(request_id="r1"))
    await table.line("another tenant's request, to read", who, by_grpc, who.send("GET", "/v1/completions/r1"))
    who = table.outside("other")
    by_grpc, by_http = who.generate("r1", [7], "OK, one of its own"), who.post("r2", [7], "200, one of its own")
    await table.line("another tenant's request, by its id", who, by_grpc, by_http)
    who = table.outside("other")
    by_grpc = who.call("cancel", inference_pb2.CancelRequest(request_id="r3"))
    await table.line("another tenant's request, to cancel", who, by_grpc, who.send("DELETE", "/v1/completions/r3"))
    who = table.outside("small")
    await who.generate("", [5])
    await table.ask("a tenant over its limit", who)


async def connections(table: Table, server: Server) -> None:
    """By how they come, and by what the gateway itself may."""
    await table.ask("plaintext, where there is TLS", table.outside("acme", plain=True))
    await table.ask("no certificate, where one is needed", table.outside("acme", ""))
    await table.ask("a certificate by somebody else", table.outside("acme", "theirs"))
    await server.admin.call("ACL", "SETUSER", "gateway", "-eval", "-evalsha")
    await table.ask("a user of Redis who may not write jobs", table.outside("acme"))
    await server.admin.call("ACL", "SETUSER", "gateway", "+eval", "+evalsha")


@pytest.mark.parametrize("role", ["worker", "operator"])
async def test_a_gateway_with_another_ones_user_does_not_start(server: Server, role: str) -> None:
    with pytest.raises(BrokerAuth, match="refused access"):
        async with running_gateway(server.roles[role]):
            pass
