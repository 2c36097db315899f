"""Tasks that nobody awaits, and cancellations that get lost on the way."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gateway.tasks import Tasks, every, honour_cancellation
from kvstore.errors import BrokerUnreachable


async def swallow() -> None:
    """Waits, and takes a cancellation for an answer, as `asyncio.wait_for` may."""
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        return


async def test_a_swallowed_cancellation_is_honoured() -> None:
    reached: list[str] = []

    async def work() -> None:
        await swallow()
        reached.append("after the command")
        honour_cancellation()
        reached.append("never")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reached == ["after the command"]


async def test_a_loop_whose_action_swallows_its_cancellation_still_ends() -> None:
    tasks = Tasks()
    tasks.spawn(every(0.0, swallow, what="test"), name="loop")
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.cancel(), 2)
    assert len(tasks) == 0


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    async def stubborn() -> None:
        await swallow()
        await asyncio.get_running_loop().create_future()

    tasks = Tasks()
    tasks.spawn(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.cancel(), 2)
    assert len(tasks) == 0


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
