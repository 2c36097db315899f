"""A broker with an append-only file that can be killed and started again: with its data, less the last of it, or empty.

It comes back on another port, as any free one will do: processes reach it through proxies, which are told.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from typing import TYPE_CHECKING, Final

from kvstore.client import Broker, BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker

if TYPE_CHECKING:
    from pathlib import Path

    from bench.chaos.proxy import Proxy

OPTIONS: Final = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    # A rewrite would leave nothing to cut the last second off.
    "auto-aof-rewrite-percentage": "0",
}

CONNECT_S: Final = 2.0


class Server:
    """``binary``: None takes what the package brings or PATH has. ``folder`` is for the server's data, and made."""

    def __init__(self, folder: Path, *, binary: Path | None = None) -> None:
        self.url = ""
        self.proxies: list[Proxy] = []
        """Are pointed at the server whenever it starts."""
        self._folder = folder
        self._binary = binary
        self._embedded: EmbeddedBroker | None = None

    @property
    def running(self) -> bool:
        return self._embedded is not None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].partition("/")[0])

    async def start(self, *, empty: bool = False) -> None:
        """Raises as ``EmbeddedBroker.start``."""
        if empty:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        embedded = EmbeddedBroker(binary=self._binary, options={**OPTIONS, "dir": str(self._folder)})
        self.url = await embedded.start()
        self._embedded = embedded
        for proxy in self.proxies:
            proxy.upstream = self.port

    async def kill(self, *, lose_s: float = 0.0) -> None:
        """SIGKILL. What was answered is in the append-only file, since it is the operating system that holds it;
        ``lose_s``: the last of it is lost all the same, as when the machine loses its power: what is written from now
        until so much later, when the server is killed."""
        assert self._embedded is not None
        assert self._embedded.pid is not None
        sizes = {path: path.stat().st_size for path in self._files()} if lose_s else {}
        await asyncio.sleep(lose_s)
        os.kill(self._embedded.pid, signal.SIGKILL)
        await self.stop()
        for path, size in sizes.items():
            os.truncate(path, size)

    async def stop(self) -> None:
        """Its data stays. Idempotent."""
        if self._embedded is not None:
            await self._embedded.stop()
            self._embedded = None

    async def connect(self, namespace: str) -> Broker:
        """A connection that no proxy is in the way of. The caller closes it. Raises as ``kvstore.client.connect``."""
        return await connect(BrokerConfig(self.url, namespace, connect_patience_s=CONNECT_S))

    def _files(self) -> list[Path]:
        return sorted(self._folder.rglob("*.incr.aof"))
