"""Tasks beside the calls."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from gateway.tasks import SKIPPED, Tasks, every
from kvstore.errors import BrokerUnreachable

if TYPE_CHECKING:
    from typing import Never


async def test_drain_waits_and_then_cancels() -> None:
    tasks = Tasks()
    quick = tasks.spawn(asyncio.sleep(0.01, "done"), name="quick")
    endless = tasks.spawn(asyncio.sleep(3600), name="endless")
    await tasks.drain(0.1)
    assert quick.result() == "done"
    assert endless.cancelled()


@pytest.mark.parametrize("error", [KeyError("ours"), BrokerUnreachable("down")])
async def test_a_failure_is_logged_with_its_traceback_unless_somebody_gets_it(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def fail() -> Never:
        raise error

    tasks = Tasks()
    with pytest.raises(type(error)):
        await asyncio.shield(tasks.spawn(fail(), name="awaited", awaited=True))
    tasks.spawn(fail(), name="left alone")
    await tasks.drain(1)
    assert len(tasks) == 0
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "task 'left alone' failed")
    assert record.exc_info is not None
    assert record.exc_info[1] is error


async def test_a_failing_action_goes_on_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[object] = [
        SKIPPED,
        BrokerUnreachable("down"),
        BrokerUnreachable("down"),
        SKIPPED,  # no success
        BrokerUnreachable("down"),
        None,
        KeyError("ours"),
        KeyError("ours"),
        None,
    ]
    done = asyncio.Event()

    async def action() -> object:
        if not outcomes:
            done.set()
            return None
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    tasks = Tasks()
    with caplog.at_level(logging.WARNING):
        tasks.spawn(every(0.0, action, what="looking"), name="loop")
        await asyncio.wait_for(done.wait(), 2)
        await tasks.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "looking fails, trying again: down",
        "looking works again, after 0 s",
        "looking fails",
        "looking works again, after 0 s",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [False, False, True, False]
