"""What waits goes out together, in order, and again until Redis has it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.block_hash import BlockHash
from kvstore.errors import BrokerUnreachable, CommitGap
from kvstore.jobs import Commit, Committed, Finished, Jobs
from kvstore.prefix_index import HeldChange, PrefixIndex, short
from octavo.v1 import inference_pb2, job_pb2
from tests.support.waiting import until
from worker import committer
from worker.committer import Committer
from worker.held import Held
from worker.scheduling.block import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)


class ScriptedJobs(Jobs):
    """Answers commits by a script: one entry for each call, an outcome for all or an exception."""

    def __init__(self, members: set[bytes]) -> None:
        self.members = members
        self.changes: list[HeldChange | None] = []
        self.script: list[Any] = []
        self.commits: list[list[str]] = []
        self.finishes: list[Any] = []
        self.finished: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def commit(
        self, worker: str, incarnation: str, deliveries: Sequence[job_pb2.Delivery], held: HeldChange | None = None
    ) -> Committed:
        assert (worker, incarnation) == ("w0", "incarnation")
        await self.gate.wait()
        self.commits.append([f"{d.request_id}{d.chunk.start}" for d in deliveries])
        self.changes.append(held)
        answer = self.script.pop(0) if self.script else Commit.WRITTEN
        if held is not None:
            self.members |= {*held.added}
            self.members -= {*held.removed}
        if isinstance(answer, Exception):  # written, but nobody was told
            raise answer
        return Committed([answer] * len(deliveries), len(self.members))

    async def finish(self, request_id: str, **_: Any) -> Finished:
        if self.finishes and (error := self.finishes.pop(0)) is not None:
            raise error
        self.finished.append(request_id)
        return Finished.ENDED


class ScriptedIndex(PrefixIndex):
    """Writes the whole set, or fails by a script."""

    def __init__(self, shown: set[bytes]) -> None:
        self.shown = shown
        self.failures: list[Exception] = []
        self.written: list[list[bytes]] = []

    async def replace(self, worker: str, incarnation: str, held: Collection[bytes]) -> int:
        assert (worker, incarnation) == ("w0", "incarnation")
        if self.failures:
            raise self.failures.pop(0)
        self.shown.clear()
        self.shown |= {*held}
        self.written.append([*held])
        return len(held)


class Line:
    """A running committer, and what it said of each delivery."""

    def __init__(self) -> None:
        self.members: set[bytes] = set()
        """What the index has."""
        self.jobs = ScriptedJobs(self.members)
        self.index = ScriptedIndex(self.members)
        self.held = Held()
        self.outcomes: list[tuple[str, Commit]] = []
        self.rolls_back: set[str] = set()
        """Jobs that go on from what is left of them."""
        self.lost: list[tuple[str, int, Mapping[int, int]]] = []
        self.committer = Committer(
            self.jobs, self.index, self.held, "w0", "incarnation", self._settled, self._roll_back
        )

    def _settled(self, delivery: job_pb2.Delivery, outcome: Commit) -> None:
        self.outcomes.append((f"{delivery.request_id}{delivery.chunk.start}", outcome))

    def _roll_back(self, request_id: str, attempt: int, known: Mapping[int, int]) -> bool:
        self.lost.append((request_id, attempt, known))
        return request_id in self.rolls_back


@pytest.fixture
async def line(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    monkeypatch.setattr(committer, "RETRY_S", 0.0)
    line = Line()
    running = asyncio.create_task(line.committer.run())
    yield line
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def delivery(request_id: str, start: int) -> job_pb2.Delivery:
    chunk = inference_pb2.Chunk(start=start, token_ids=[1])
    return job_pb2.Delivery(request_id=request_id, attempt=1, chunk=chunk)


async def test_steps_that_wait_go_out_in_one_commit(line: Line) -> None:
    line.jobs.gate.clear()
    for start in range(5):
        await line.committer.put([delivery("a", start)])
        await asyncio.sleep(0)  # the first one is on its way by then
    line.jobs.gate.set()
    await line.committer.flushed()
    assert line.jobs.commits == [["a0"], ["a1", "a2", "a3", "a4"]]
    assert line.outcomes == [(f"a{start}", Commit.WRITTEN) for start in range(5)]
    assert line.committer.unsettled == 0


async def test_the_engine_waits_only_when_many_steps_wait(line: Line) -> None:
    line.jobs.gate.clear()
    await line.committer.put([delivery("a", 0)])
    await asyncio.sleep(0)
    for start in range(committer.STEPS_AHEAD):
        await line.committer.put([delivery("a", start + 1)])
    one_more = asyncio.create_task(line.committer.put([delivery("a", 99)]))
    await asyncio.sleep(0)
    assert not one_more.done()
    line.jobs.gate.set()
    await one_more
    await line.committer.flushed()
    assert len(line.outcomes) == committer.STEPS_AHEAD + 2


async def test_a_failed_commit_is_repeated(line: Line) -> None:
    line.jobs.script = [BrokerUnreachable("away"), BrokerUnreachable("away"), Commit.DUPLICATE]
    await line.committer.put([delivery("a", 0)])
    await line.committer.flushed()
    assert line.jobs.commits == [["a0"]] * 3
    assert line.outcomes == [("a0", Commit.DUPLICATE)]


async def test_a_job_with_a_gap_that_cannot_go_on_is_ended_and_the_others_are_told_their_outcome(line: Line) -> None:
    line.jobs.script = [CommitGap({"a": {0: 3}}), Commit.DUPLICATE]
    line.jobs.finishes = [BrokerUnreachable("flapping"), None]
    await line.committer.put([delivery("a", 7), delivery("b", 2), delivery("a", 8)])
    await line.committer.flushed()
    assert line.jobs.finished == ["a"]
    assert line.jobs.commits == [["a7", "b2", "a8"], ["b2"]]
    assert line.outcomes == [("a7", Commit.FENCED), ("b2", Commit.DUPLICATE), ("a8", Commit.FENCED)]


async def test_a_job_with_a_gap_goes_on_and_what_was_queued_of_it_is_forgotten(line: Line) -> None:
    """Up to the moment in which it is taken back: what comes later is new."""
    line.rolls_back = {"a"}
    line.jobs.gate.clear()
    line.jobs.script = [CommitGap({"a": {0: 3}}), Commit.DUPLICATE]
    await line.committer.put([delivery("a", 7), delivery("b", 2)])
    await asyncio.sleep(0)  # on its way
    await line.committer.put([delivery("a", 8), delivery("b", 3)])
    await line.committer.put([delivery("a", 9)])
    line.jobs.gate.set()
    await line.committer.flushed()
    await line.committer.put([delivery("a", 3), delivery("b", 4)])
    await line.committer.flushed()
    assert line.lost == [("a", 1, {0: 3})]
    assert line.jobs.finished == []
    assert line.jobs.commits == [["a7", "b2"], ["b2"], ["b3"], ["a3", "b4"]]
    assert line.outcomes == [
        ("b2", Commit.DUPLICATE),
        ("b3", Commit.WRITTEN),
        ("a3", Commit.WRITTEN),
        ("b4", Commit.WRITTEN),
    ]
    assert line.committer.unsettled == 0


async def test_a_job_may_have_gaps_again(line: Line) -> None:
    line.rolls_back = {"a"}
    line.jobs.script = [CommitGap({"a": {0: 3}}), Commit.WRITTEN, CommitGap({"a": {0: 1, 1: 0}})]
    for start in (7, 3, 1):
        await line.committer.put([delivery("a", start)])
        await line.committer.flushed()
    assert line.lost == [("a", 1, {0: 3}), ("a", 1, {0: 1, 1: 0})]
    assert line.outcomes == [("a1", Commit.WRITTEN)]
    assert line.jobs.commits == [["a7"], [], ["a3"], [], ["a1"]]


async def test_of_several_gaps_each_is_judged(line: Line) -> None:
    line.rolls_back = {"b"}
    line.jobs.script = [CommitGap({"a": {0: 3}, "b": {1: 2}})]
    await line.committer.put([delivery("a", 7), delivery("b", 5), delivery("c", 1)])
    await line.committer.flushed()
    assert line.jobs.finished == ["a"]
    assert line.jobs.commits == [["a7", "b5", "c1"], ["c1"]]
    assert line.outcomes == [("a7", Commit.FENCED), ("c1", Commit.WRITTEN)]


# The prefix index


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
