"""Bodies, as they come: no sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from gateway.http import bodies
from gateway.http.bodies import LARGE, Bodies
from gateway.http.problems import Failed


class Sender:
    """A client that sends what it is told to, as far as it is read."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.read = 0
        head = [(b"content-type", b"Application/JSON; charset=utf-8")]
        self.request = Request({"type": "http", "headers": head}, self._receive)

    def send(self, body: bytes, *, more: bool = True) -> None:
        self.parts.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.parts.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> Any:
        part = await self.parts.get()
        self.read += 1
        return part


def kept(body: dict[str, Any]) -> dict[str, Any]:
    return body


async def test_a_body_comes_in_parts() -> None:
    reader, sender = Bodies(100), Sender()
    for part in (b'{"a"', b": [1, ", b"2]}"):
        sender.send(part, more=part[-1:] != b"}")
    assert await reader.read(sender.request, kept) == {"a": [1, 2]}
    await reader.close()


async def test_a_body_may_have_as_many_bytes_as_the_limit_says() -> None:
    body = b'{"a": "' + b"x" * 91 + b'"}'
    reader = Bodies(len(body))
    for extra, fits in ((b"", True), (b" ", False)):
        sender = Sender()
        sender.send(body + extra, more=False)
        if fits:
            assert len((await reader.read(sender.request, kept))["a"]) == 91
        else:
            with pytest.raises(Failed) as caught:
                await reader.read(sender.request, kept)
            assert caught.value.problem.status == 413
    await reader.close()


async def test_only_so_many_large_bodies_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_LARGE", 1)
    reader, first, second, small = Bodies(10 * LARGE), Sender(), Sender(), Sender()
    large = b'{"a": "' + b"x" * LARGE
    readings = []
    for sender in (first, second):
        for part in (large, b"x", b"x"):
            sender.send(part)
        readings.append(asyncio.create_task(reader.read(sender.request, kept)))
        for _ in range(20):
            await asyncio.sleep(0)
    assert (first.read, second.read) == (3, 1)
    small.send(b"{}", more=False)
    assert await reader.read(small.request, kept) == {}
    for sender in (first, second):
        sender.send(b'"}', more=False)
    assert [len((await each)["a"]) for each in readings] == [LARGE + 2] * 2
    await reader.close()


async def test_who_leaves_while_it_sends_is_told_nothing() -> None:
    reader, sender = Bodies(100), Sender()
    sender.send(b"{")
    sender.leave()
    with pytest.raises(ClientDisconnect):
        await reader.read(sender.request, kept)
    await reader.close()


async def test_what_is_made_of_a_body_may_be_refused() -> None:
    reader, sender = Bodies(100), Sender()
    sender.send(b"{}", more=False)
    with pytest.raises(ZeroDivisionError):
        await reader.read(sender.request, lambda _: 1 // 0)
    await reader.close()
