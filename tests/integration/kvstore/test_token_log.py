"""Reading token logs: in order, from anywhere, past anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.token_log import MAX_BYTES, decode_or_count, encode, read
from octavo.v1 import inference_pb2

from .conftest import Stage, chunk

if TYPE_CHECKING:
    from kvstore.client import Broker


async def test_pages_and_positions(stage: Stage, broker: Broker) -> None:
    """More entries than one page holds, read in two goes."""
    worker = await stage.worker()
    await stage.running("r1", worker)
    written = [chunk("r1", index, [index]) for index in range(1100)]
    await stage.jobs.commit(worker.id, worker.incarnation, written[:700])
    first, position = await read(broker, "r1")
    assert first == written[:700]
    assert await read(broker, "r1", position) == ([], position)
    await stage.jobs.commit(worker.id, worker.incarnation, written[700:])
    second, _ = await read(broker, "r1", position)
    assert second == written[700:]
    assert broker.malformed == 0


async def test_what_is_no_delivery_is_skipped_and_counted(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.running("r1", worker)
    await stage.jobs.commit(worker.id, worker.incarnation, [chunk("r1", 0, [1])])
    hostile = [
        b"\x80\x04pickle",
        b"",
        encode([chunk("r2", 0, [1])]),
        encode([chunk("r1", 0, [1]), chunk("r1", 1, [2])]),
        b"\x0a\x02\x0a\x00",
        bytes(MAX_BYTES + 1),
    ]
    for value in hostile:
        await broker.call("XADD", broker.keys.log("r1"), "*", "d", value)
    await broker.call("XADD", broker.keys.log("r1"), "*", "other", "field")
    await stage.jobs.commit(worker.id, worker.incarnation, [chunk("r1", 1, [2], finish=inference_pb2.STOP)])
    deliveries, _ = await read(broker, "r1")
    assert [delivery.chunk.start for delivery in deliveries] == [0, 1]
    assert broker.malformed == len(hostile) + 1
    assert decode_or_count(broker, b"\xff") == []
    assert broker.malformed == len(hostile) + 2
