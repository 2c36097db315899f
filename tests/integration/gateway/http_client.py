"""A client of a gateway's HTTP: OpenAI's own, a plain one, and raw sockets."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx2
import openai

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

    from gateway.server import Gateway, Ready


class HttpClient:
    """Of one gateway. Nothing is tried again."""

    def __init__(
        self, gateway: Gateway, ready: Ready, *, api_key: str = "secret", tls: ssl.SSLContext | None = None
    ) -> None:
        """``api_key``: OpenAI's client sends it, the plain one does not."""
        assert ready.http is not None
        self.gateway = gateway
        self.ready = ready
        self.base_url = f"{'https' if tls else 'http'}://{ready.http}/v1"
        settings: dict[str, Any] = {"trust_env": False, "timeout": 20, "verify": tls or True}
        self.plain = httpx2.AsyncClient(base_url=self.base_url.removesuffix("/v1"), **settings)
        self.openai = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=api_key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(**settings),
        )

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.openai.close()
        await self.plain.aclose()

    @property
    def open_connections(self) -> set[Any]:
        """As the server has them."""
        assert self.gateway._http is not None
        return set(self.gateway._http._state.connections)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection."""
        host, _, port = self.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        return await asyncio.open_connection(host, int(port))


def raw_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def error_of(response: httpx2.Response) -> tuple[int, dict[str, Any]]:
    """Status and error of a plain response, which has nothing else."""
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert response.headers["content-type"] == "application/json"
    return response.status_code, body["error"]
