"""Calls for help through a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.help import Call, HelpLine
from kvstore.registry import Load

if TYPE_CHECKING:
    from .conftest import Stage


async def test_calls_are_heard_by_those_with_the_same_pages(stage: Stage) -> None:
    same, other = HelpLine(stage.broker, "f"), HelpLine(stage.broker, "g")
    await same.open()
    await other.open()
    try:
        malformed = stage.broker.malformed
        await HelpLine(stage.broker, "f").call(Call("w0", 2.5, 0.25))
        await stage.broker.call("PUBLISH", stage.broker.keys.help("f"), "nonsense")
        await HelpLine(stage.broker, "f").call(Call("w1", 1.5, 0.0))
        await HelpLine(stage.broker, "g").call(Call("w2", 0.5, 0.0))
        async with asyncio.timeout(10):
            heard = same.calls()
            assert [await anext(heard), await anext(heard)] == [Call("w0", 2.5, 0.25), Call("w1", 1.5, 0.0)]
            assert await anext(other.calls()) == Call("w2", 0.5, 0.0)
        assert stage.broker.malformed == malformed + 1
    finally:
        await same.close()
        await other.close()


async def test_unread_jobs_are_those_that_the_worker_was_not_given(stage: Stage) -> None:
    line = HelpLine(stage.broker, "f")
    try:
        worker = await stage.worker()
        assert await line.unread(worker.id, worker.incarnation) == (0, Load())
        for name in ("a", "b", "c"):
            await stage.submit(name, worker)
        assert await line.unread(worker.id, worker.incarnation) == (3, Load(3, 30, 0, 3))
        await stage.entries(worker, 1)
        assert await line.unread(worker.id, worker.incarnation) == (2, Load(3, 30, 0, 3))
        await stage.jobs.cancel("c")
        assert await line.unread(worker.id, worker.incarnation) == (1, Load(2, 20, 0, 2))
        await stage.broker.call("DEL", stage.broker.keys.jobs(worker.id))
        await stage.broker.call("SET", stage.broker.keys.jobs(worker.id), "a key of another type")
        assert (await line.unread(worker.id, worker.incarnation))[0] == 0
    finally:
        await line.close()
        await stage.broker.call("DEL", stage.broker.keys.jobs("w0"))
