"""Keys of another type, in whose place nothing is put by itself: errors name them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import BrokerWrongType
from kvstore.jobs import Submitted

from .conftest import Stage, on_both_servers

if TYPE_CHECKING:
    from kvstore.client import Broker

pytestmark = on_both_servers


async def test_the_set_of_workers(stage: Stage, broker: Broker) -> None:
    worker, key = await stage.worker(), broker.keys.workers
    await broker.call("DEL", key)
    await broker.call("SET", key, "junk")
    for look in (stage.registry.workers, stage.jobs.queues, stage.jobs.ledger, stage.jobs.orphans):
        with pytest.raises(BrokerWrongType, match=rf"WRONGTYPE .*\({re.escape(key)}\)$") as caught:
            await look()
        assert caught.value.keys == (key,), look
    with pytest.raises(BrokerWrongType) as caught:
        await stage.registry.renew(worker)
    assert caught.value.keys == (key,)
    # As they say: once it is deleted all goes on.
    await broker.call("DEL", key)
    assert (await stage.registry.renew(worker)).held_lease
    assert [each.id for each in await stage.registry.workers()] == ["w0"]


async def test_a_workers_stream(stage: Stage, broker: Broker) -> None:
    worker, other = await stage.worker(), await stage.worker("w1")
    key = broker.keys.jobs("w0")
    await broker.call("HSET", key, "a", "junk")
    with pytest.raises(BrokerWrongType) as caught:
        await stage.submit("r1", worker)
    assert caught.value.keys == (key,)
    assert await stage.jobs.get("r1") is None
    assert await stage.submit("r1", other) is Submitted.ACCEPTED
    await broker.call("DEL", key)
    assert await stage.submit("r2", worker) is Submitted.ACCEPTED
