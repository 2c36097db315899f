"""A proxy between one process and the broker: it delays, cuts off, loses a reply and closes, as it is told.

    async with Proxy(port) as proxy:
        proxy.url                       # what the process is given; stays the same for the proxy's whole life
        proxy.upstream = other_port     # a server that was started again, elsewhere

What a cut holds back is not lost: as with a network that comes back, it arrives when the cut is healed, even if its
sender has given up by then. That is how commands come late.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

HOST: Final = "127.0.0.1"
_PIECE: Final = 2**18
_MOST_PIECES: Final = 256
"""Read and not yet passed on, each way of each connection; the sender waits beyond that."""

_Queue = asyncio.Queue[tuple[float, bytes]]


class Proxy:
    """Listens on a free port of its own. To be used in one event loop."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        """Port of the server, for connections that come from now on."""
        self.delay_s = 0.0
        """Replies come so much later. They don't wait for each other: it is latency, not less throughput."""
        self.url = ""
        self.connections = 0
        """That came so far."""
        self.lost = 0
        """Replies that were lost so far."""
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cuts = 0
        self._losing: tuple[bytes, asyncio.Future[None]] | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pairs: set[_Pair] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.url = f"redis://{HOST}:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """From now on no byte passes, either way. Connections stay open, new ones can be made and are silent. Cuts are
        counted: each has to be joined."""
        self._cuts += 1
        self._flowing.clear()

    def join(self) -> None:
        """Ends one cut. May be called when there is none."""
        self._cuts = max(0, self._cuts - 1)
        if not self._cuts:
            self._flowing.set()

    def heal(self) -> None:
        """Ends all cuts and delays."""
        self._cuts, self.delay_s = 0, 0.0
        self._flowing.set()

    def reset(self) -> None:
        """Closes all connections."""
        for pair in self._pairs:
            pair.abort()

    def lose_reply(self, marker: bytes) -> asyncio.Future[None]:
        """Of the next request that contains ``marker``, the server's answer is not passed on, and the connection is
        closed instead. Done when that has happened; cancel it to ask for it no longer."""
        self._losing = (marker, asyncio.get_running_loop().create_future())
        return self._losing[1]

    def _is_to_be_lost(self, data: bytes) -> asyncio.Future[None] | None:
        """The future of a reply that is to be lost, if it is that of this request."""
        if self._losing is None or self._losing[0] not in data:
            return None
        done, self._losing = self._losing[1], None
        return None if done.cancelled() else done

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        # Cancelled or closed: there is nobody to tell.
        with suppress(OSError, asyncio.CancelledError):
            await self._flowing.wait()
            upstream_reader, upstream_writer = await asyncio.open_connection(HOST, self.upstream)
            pair = _Pair(writer, upstream_writer)
            self._pairs.add(pair)
            try:
                await self._pass_on(reader, upstream_reader, pair)
            finally:
                self._pairs.discard(pair)
                upstream_writer.transport.abort()
        writer.transport.abort()
        self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, upstream: asyncio.StreamReader, pair: _Pair) -> None:
        """Returns when one side has closed, and what it sent before has arrived."""
        requests: _Queue = asyncio.Queue(_MOST_PIECES)
        replies: _Queue = asyncio.Queue(_MOST_PIECES)
        parts = [
            asyncio.create_task(self._read(reader, requests, None)),
            asyncio.create_task(self._read(upstream, replies, pair)),
            asyncio.create_task(self._write(requests, pair.to_server, pair)),
            asyncio.create_task(self._write(replies, pair.to_client, None)),
        ]
        try:
            await asyncio.wait(parts[2:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _read(self, source: asyncio.StreamReader, queue: _Queue, replies_of: _Pair | None) -> None:
        """Into the queue, with the time from which each piece may go on; an empty piece is the end."""
        data = b"-"
        while data:
            try:
                data = await source.read(_PIECE)
            except OSError:
                data = b""
            if data and replies_of is not None and replies_of.doomed is not None:
                self.lost += 1
                replies_of.lose()
                return
            delay = self.delay_s if replies_of is not None and data else 0.0
            await queue.put((asyncio.get_running_loop().time() + delay, data))

    async def _write(self, queue: _Queue, sink: asyncio.StreamWriter, requests_of: _Pair | None) -> None:
        with suppress(OSError):
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                await self._flowing.wait()
                if not data:
                    return
                if requests_of is not None and (losing := self._is_to_be_lost(data)) is not None:
                    requests_of.doomed = losing
                sink.write(data)
                await sink.drain()


class _Pair:
    """A connection of the process, and the one to the server that belongs to it."""

    def __init__(self, to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter) -> None:
        self.to_client = to_client
        self.to_server = to_server
        self.doomed: asyncio.Future[None] | None = None
        """Set: the next reply is lost."""

    def abort(self) -> None:
        for writer in (self.to_client, self.to_server):
            writer.transport.abort()

    def lose(self) -> None:
        """Closes it in the reply's stead."""
        assert self.doomed is not None
        if not self.doomed.done():
            self.doomed.set_result(None)
        self.abort()
