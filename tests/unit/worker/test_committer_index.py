"""What the pool begins and ceases to offer goes out with what steps produced, and drift is mended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import BlockHash
from kvstore.errors import BrokerUnreachable, CommitGap
from kvstore.jobs import Commit
from kvstore.prefix_index import HeldChange, short
from tests.support.waiting import until
from tests.unit.worker.committer_line import Line, delivery, running_line
from worker import committer
from worker.scheduling.block import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)


@pytest.fixture
async def line(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    async with running_line(monkeypatch) as line:
        yield line


def stored(*hashes: BlockHash) -> list[Event]:
    return [Event(EventKind.STORED, hash_) for hash_ in hashes]


def change(*added: BlockHash) -> HeldChange:
    return HeldChange(tuple(short(hash_) for hash_ in added))


async def test_what_the_pool_offers_goes_along_with_deliveries(line: Line) -> None:
    line.jobs.gate.clear()
    line.held.apply(stored(A))
    await line.committer.put([delivery("a", 0)])
    await asyncio.sleep(0)  # on its way
    line.held.apply(stored(B))
    await line.committer.put([delivery("a", 1)])
    await line.committer.put([])
    line.jobs.gate.set()
    await line.committer.flushed()
    assert line.jobs.commits == [["a0"], ["a1"]]
    assert line.jobs.changes == [change(A), change(B)]
    assert line.members == line.held.offered == {short(A), short(B)}


async def test_a_step_without_deliveries_is_committed_for_the_index_alone(line: Line) -> None:
    await line.committer.put([])
    await line.committer.flushed()
    assert line.jobs.commits == []
    line.held.apply(stored(A))
    await line.committer.put([])
    await line.committer.flushed()
    assert (line.jobs.commits, line.jobs.changes) == ([[]], [change(A)])
    assert line.committer.unsettled == 0


async def test_a_change_survives_failures_and_what_comes_meanwhile(line: Line) -> None:
    line.jobs.gate.clear()
    line.jobs.script = [BrokerUnreachable("lost its reply"), CommitGap({"a": {0: 3}}), Commit.WRITTEN]
    line.held.apply(stored(A))
    await line.committer.put([delivery("a", 7)])
    await asyncio.sleep(0)
    line.held.apply([*stored(B), Event(EventKind.EVICTED, A)])
    await line.committer.put([])
    line.jobs.gate.set()
    await line.committer.flushed()
    assert line.jobs.changes[:3] == [change(A)] * 3
    assert line.jobs.changes[3:] == [HeldChange((short(B),), (short(A),))]
    assert line.members == {short(B)}
    assert not line.held.drifted


async def test_drift_that_a_commit_shows_is_mended_at_once(line: Line) -> None:
    line.held.apply(stored(A))
    await line.committer.put([])
    await line.committer.flushed()
    line.members.clear()
    line.held.apply(stored(B))
    await line.committer.put([delivery("a", 0)])
    await line.committer.flushed()
    assert line.index.written == [[short(A), short(B)]]
    assert line.members == {short(A), short(B)}
    assert (line.held.drifted, line.held.drifts) == (False, 1)


async def test_deliveries_do_not_wait_for_an_index_that_cannot_be_mended(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.index.failures = [BrokerUnreachable("full")] * 2
    line.held.seen(line.held.look(), 5)
    await line.committer.put([delivery("a", 0)])
    await line.committer.flushed()
    assert line.outcomes == [("a0", Commit.WRITTEN)]
    assert len(line.index.failures) == 1  # and not again and again
    assert line.held.drifted
    monkeypatch.setattr(committer, "MEND_EVERY_S", 0.0)
    line.committer._mend_due = 0.0
    line.committer.publish()

    async def mended() -> bool:
        return not line.held.drifted

    await until(mended, within_s=5)
    assert line.index.written == [[]]
