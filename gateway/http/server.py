"""The HTTP server beside the gRPC server, in one event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final

from uvicorn import Config
from uvicorn.server import ServerState

from gateway.config import MAX_BODY_BYTES, address
from gateway.http.app import Api
from gateway.http.bodies import Bodies
from gateway.http.exchange import Backend
from gateway.http.protocol import HEAD_S, Protocol

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from starlette.types import Message, Receive, Scope, Send

    from gateway.auth import Doorman
    from gateway.http.desk import Desk
    from gateway.metrics import Metrics
    from gateway.models import Models
    from gateway.service import InferenceService
    from gateway.tokenize import TokenizerPool

KEEP_ALIVE_S: Final = 75
"""How long a connection may be idle: longer than the minute after which proxies let go of theirs."""
GOODBYE_S: Final = 5.0
"""How long a client may take to say that it has seen the end of a TLS connection."""
PROBES: Final = (
    # A client whose host died sends nothing: probes find out, and its jobs are ended, after half a minute as by gRPC.
    # Where something is on its way to it, TCP sends that again instead, for a quarter of an hour: a job that has begun
    # to speak may come to its end. Less would cut off a client that lives and does not read for a while.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
)


class HttpServer:
    """``start``, then ``stop`` once. While the gateway drains it serves on, and what it serves is refused."""

    def __init__(
        self,
        *,
        service: InferenceService,
        doorman: Doorman,
        models: Models,
        tokenizers: TokenizerPool,
        metrics: Metrics,
        serves: Callable[[], bool],
        desk: Desk | None,
    ) -> None:
        """``desk``: of files and batches; None: there are none. It is closed with the server."""
        self._bodies = Bodies(MAX_BODY_BYTES)
        self._desk = desk
        backend = Backend(service, doorman, models, tokenizers, self._bodies)
        batches = None
        if desk is not None:
            from gateway.http.batches import BatchApi  # with rq, which others do without

            batches = BatchApi(desk, self._bodies)
        self._app = _Counted(Api(backend, metrics.registry, serves, batches).app(), metrics)
        self._state = ServerState()

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None, *, reuse_port: bool) -> str:
        """Its HOST:PORT. ``tls``: None for plaintext; with `reuse_port` others who ask for that too may listen there.
        Raises OSError for a port that can't be listened on."""
        config = Config(
            self._app,
            http=Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # what clients do wrong is told to them
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()

        def connect() -> Protocol:
            return Protocol(config, self._state, {})

        self._server = await asyncio.get_running_loop().create_server(
            connect,
            host,
            port,
            reuse_port=reuse_port,
            ssl=tls,
            ssl_handshake_timeout=HEAD_S if tls else None,
            ssl_shutdown_timeout=GOODBYE_S if tls else None,
        )
        for each in self._server.sockets:
            for probe in PROBES:  # which the connections inherit
                each.setsockopt(*probe)
        return address(host, self._server.sockets[0].getsockname()[1])

    async def stop(self, within_s: float) -> None:
        """Takes no more connections; answers get so many seconds to end, and their clients as many to read them, before
        they are cut off."""
        self._server.close()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        if tasks := set(self._state.tasks):
            _, late = await asyncio.wait(tasks, timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        left = [connection for connection in self._state.connections if isinstance(connection, Protocol)]
        for connection in left:
            connection.transport.close()  # once what it was sent is on its way
        if reading := [asyncio.create_task(connection.gone.wait()) for connection in left]:
            await asyncio.wait(reading, timeout=within_s)
        for connection in left:
            connection.transport.abort()
        for task in reading:
            task.cancel()
        await self._server.wait_closed()
        await self._bodies.close()
        if self._desk is not None:
            await self._desk.close()


class _Counted:
    """An application whose responses are counted."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # What clients make up must not become time series.
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.http_responses.labels(path=path, status=str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
