"""uvicorn's HTTP/1.1 over httptools, with the bounds that it lacks: of heads, of their senders' patience, of
connections, and of what comes behind an answer. It stays HTTP/1.1, whatever else a client offers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.http.problems import Problem

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

MAX_HEAD: Final = 64 * 1024
"""Bytes of a request's first line and headers, nearly: what a last read brings beyond is taken."""
HEAD_S: Final = 10.0
"""How long these may take to come, from the connection's or the request's first byte on."""
MAX_BEHIND: Final = 64 * 2**20
"""Bytes of a body that are still taken, and thrown away, once it was refused: who is cut off while it sends may not see
why."""
BEHIND_S: Final = 10.0
"""How long that may take."""
MAX_CONNECTIONS: Final = 4096


class Protocol(HttpToolsProtocol):
    """One connection."""

    _timer: asyncio.TimerHandle | None = None
    _head = 0
    """Bytes of the present head."""
    _in_head = True
    _in_body = False
    _requests = 0
    """That have come whole."""
    _behind = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gone = asyncio.Event()
        """The connection is no more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(Problem(503, "too many connections; try again later", "server_error"))
        else:
            self._wait(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._stop_waiting()
        self.gone.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """It has sent something."""
        if self.transport.is_closing():
            return
        if self._in_head and self._timer is None:
            self._wait(HEAD_S)
        before = self._requests
        self._parse(data)
        if self._in_head and self._requests == before:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(Problem(431, f"the headers are too large: must have at most {MAX_HEAD} bytes"))

    def on_headers_complete(self) -> None:
        """A head is whole."""
        if self._offers():
            return  # it comes once more
        self._stop_waiting()
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        super().on_body(body)
        if self.cycle.response_complete:
            self._behind += len(body)
            if self._behind > MAX_BEHIND:
                self.transport.abort()

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self._offers():
            return
        self._stop_waiting()
        self._requests += 1
        self._head, self._in_head, self._in_body = 0, True, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is whole. Its request may not be."""
        super().on_response_complete()
        if self._in_body:
            self._wait(BEHIND_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        closes = cycle.scope["http_version"] != "1.1"
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if closes else app)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(Problem(400, msg))

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._left_of(data)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _left_of(self, data: bytes) -> bytes:
        """What is still to be parsed. The parser takes what follows a head that offers another protocol for that
        protocol: such a head is parsed again without the offer, as Java's client makes one with each request."""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if not self._offers():
                return b""
            version = self.parser.get_http_version().encode()
            head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
            head += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base class has it
            return b"\r\n".join([*head, b"", data[upgrade.args[0] :]])
        return b""

    def _offers(self) -> bool:
        """Whether the head offers another protocol."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def _refuse(self, problem: Problem) -> None:
        """Answers without a request, and hangs up."""
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            if not self._in_body or self.cycle.response_started or self.pipeline:
                self.transport.abort()  # in the middle of another answer
                return
            # Its own body is broken: whoever reads that finds that its client has gone, and can say nothing more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = problem.body()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[problem.status] + head.encode() + body)
        self.transport.close()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._too_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """For clients of HTTP/1.0, which know no chunks: an answer whose length is not said ends with its connection."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        open_ended = False

        async def sent(message: Message) -> None:
            nonlocal open_ended
            if message["type"] == "http.response.start":
                open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if open_ended:
                    cycle.chunked_encoding = False
            elif open_ended:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answered
