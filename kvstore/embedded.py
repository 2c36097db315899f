"""A broker of one's own: a Redis-compatible server as a child process, for demos, tests and single machines."""

from __future__ import annotations


class EmbeddedBroker:
    """A server on 127.0.0.1 that lives as long as its parent, and keeps nothing on disk."""

    url: str
    pid: int

    async def start(self) -> str:
        """Starts the server, waits until it answers, and returns its URL. Raises BrokerUnreachable with the
        server's own log."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stops the server and removes its folder. Idempotent."""
        raise NotImplementedError
