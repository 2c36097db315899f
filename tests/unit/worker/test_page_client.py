"""What a worker makes of a store of pages that fails."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvstore.errors import BrokerFull
from tests.unit.worker.page_store import Shop
from worker import page_client


async def works() -> bool:
    return True


async def fails() -> bool:
    raise BrokerFull("it is full")


async def hangs() -> bool:
    await asyncio.Event().wait()
    return True


async def test_an_outage_in_which_reads_work_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    client = Shop().client
    for _ in range(3):
        assert await client.call(fails) is None
        assert await client.call(works, reads=True) is True
        await client.until_allowed()
    assert [record.message for record in caplog.records] == ["using the store of pages fails, trying again: it is full"]
    assert await client.call(works) is True
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert caplog.records[1].message.startswith("using the store of pages works again")


@pytest.mark.parametrize("reads", [False, True])
async def test_who_writes_is_not_stopped_by_reads_that_fail_nor_the_other_way_round(reads: bool) -> None:
    """Nor does what works there make a failing store be asked at once again."""
    client, asked = Shop().client, list[str]()

    async def failing() -> bool:
        asked.append("failing")
        return await fails()

    for _ in range(3):
        assert await client.call(failing, reads=reads) is None
        assert await client.call(works, reads=not reads) is True
    assert asked == ["failing"]


async def test_a_call_with_less_time_than_a_store_may_take_is_given_up_in_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    assert await shop.client.call(hangs, limit_s=0.05, reads=True) is None
    assert await shop.client.call(works, reads=True) is True
    assert not caplog.records
    monkeypatch.setattr(page_client, "CALL_S", 0.05)
    assert await shop.client.call(hangs, limit_s=0.05, reads=True) is None
    assert [record.message for record in caplog.records] == [
        "using the store of pages fails, trying again: no answer in 0.05 s"
    ]
    assert shop.count("errors_total", error="TimeoutError") == 1
