"""What waits goes out together, in order, and again until Redis has it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import BrokerUnreachable, CommitGap
from kvstore.jobs import Commit, Finished, Jobs
from octavo.v1 import inference_pb2, job_pb2
from worker import committer
from worker.committer import Committer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class ScriptedJobs(Jobs):
    """Answers commits by a script: one entry for each call, an outcome for all or an exception."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.commits: list[list[str]] = []
        self.finishes: list[Any] = []
        self.finished: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def commit(self, worker: str, incarnation: str, deliveries: Sequence[job_pb2.Delivery]) -> list[Commit]:
        await self.gate.wait()
        self.commits.append([f"{d.request_id}{d.chunk.start}" for d in deliveries])
        answer = self.script.pop(0) if self.script else Commit.WRITTEN
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(deliveries)

    async def finish(self, request_id: str, **_: Any) -> Finished:
        if self.finishes and (error := self.finishes.pop(0)) is not None:
            raise error
        self.finished.append(request_id)
        return Finished.ENDED


class Line:
    """A running committer, and what it said of each delivery."""

    def __init__(self) -> None:
        self.jobs = ScriptedJobs()
        self.outcomes: list[tuple[str, Commit]] = []
        self.committer = Committer(self.jobs, "w0", "incarnation", self._settled)

    def _settled(self, delivery: job_pb2.Delivery, outcome: Commit) -> None:
        self.outcomes.append((f"{delivery.request_id}{delivery.chunk.start}", outcome))


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


async def test_a_job_with_a_gap_is_ended_and_the_others_are_told_their_outcome(line: Line) -> None:
    line.jobs.script = [CommitGap({"a": {0: 3}}), Commit.DUPLICATE]
    line.jobs.finishes = [BrokerUnreachable("flapping"), None]
    await line.committer.put([delivery("a", 7), delivery("b", 2), delivery("a", 8)])
    await line.committer.flushed()
    assert line.jobs.finished == ["a"]
    assert line.jobs.commits == [["a7", "b2", "a8"], ["b2"]]
    assert line.outcomes == [("a7", Commit.FENCED), ("b2", Commit.DUPLICATE), ("a8", Commit.FENCED)]
