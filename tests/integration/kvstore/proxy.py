"""A proxy in front of a broker that loses, delays and cuts what it is told to."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Proxy:
    """``async with Proxy(url) as proxy``: connect to ``proxy.url``."""

    upstream: str
    lose: bytes | None = None
    """Of the next request that contains this, the reply is lost: the connection closes once the server has answered."""
    lost: int = 0
    accepted: int = 0
    """Connections so far."""
    delay_s: float = 0.0
    """Replies come so much later."""
    url: str = ""
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _taking: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> Proxy:
        self.release()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self) -> None:
        """Holds replies back; the connections stay open."""
        self._flowing.clear()

    def freeze(self) -> None:
        """Holds requests and replies back, and what the other side closes: nobody hears of anything."""
        self._flowing.clear()
        self._taking.clear()

    def release(self) -> None:
        """Lets all of it go."""
        self._flowing.set()
        self._taking.set()

    def cut(self) -> None:
        """Closes all connections."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        self._writers.add(writer)
        upstream_writer: asyncio.StreamWriter | None = None
        with suppress(OSError, asyncio.CancelledError):
            target = urlsplit(self.upstream)
            upstream, upstream_writer = await asyncio.open_connection(target.hostname, target.port)
            self._writers.add(upstream_writer)
            await self._pump(reader, writer, upstream, upstream_writer)
        for one in (writer, upstream_writer):
            if one is not None:
                one.transport.abort()
                self._writers.discard(one)
        self._tasks.discard(task)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: asyncio.StreamReader,
        upstream_writer: asyncio.StreamWriter,
    ) -> None:
        doomed = False

        async def requests() -> None:
            nonlocal doomed
            while data := await reader.read(2**20):
                if self.lose is not None and self.lose in data:
                    self.lose, doomed = None, True
                await self._taking.wait()
                upstream_writer.write(data)
                await upstream_writer.drain()
            await self._taking.wait()

        async def replies() -> None:
            while data := await upstream.read(2**20):
                if doomed:
                    self.lost += 1
                    return
                await self._flowing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()

        both = {asyncio.create_task(requests()), asyncio.create_task(replies())}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)
