"""Tasks that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from gateway.tasks import Tasks, every
from kvstore.errors import BrokerUnreachable

if TYPE_CHECKING:
    import pytest


async def test_drain_waits_and_then_cancels() -> None:
    tasks = Tasks()
    quick = tasks.spawn(asyncio.sleep(0.01, "done"), name="quick")
    endless = tasks.spawn(asyncio.sleep(3600), name="endless")
    await tasks.drain(0.1)
    assert quick.result() == "done"
    assert endless.cancelled()


async def test_a_failing_action_goes_on_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Exception | None] = [
        BrokerUnreachable("down"),
        BrokerUnreachable("down"),
        None,
        KeyError("ours"),
        KeyError("ours"),
        None,
    ]
    done = asyncio.Event()

    async def action() -> None:
        if not outcomes:
            done.set()
            return
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    tasks = Tasks()
    with caplog.at_level(logging.WARNING):
        tasks.spawn(every(0.0, action, what="looking"), name="loop")
        await asyncio.wait_for(done.wait(), 2)
        await tasks.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "looking fails: down",
        "looking works again",
        "looking fails",
        "looking works again",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [False, False, True, False]
