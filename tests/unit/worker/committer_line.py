"""A committer with a scripted broker, for its tests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvstore.jobs import Commit, Committed, Finished, Jobs
from kvstore.prefix_index import HeldChange, PrefixIndex
from octavo.v1 import inference_pb2, job_pb2
from worker import committer
from worker.committer import Committer
from worker.held import Held
from worker.past import RolledBack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    import pytest


class ScriptedJobs(Jobs):
    """Answers commits by a script: one entry for each call, an outcome for all or an exception."""

    def __init__(self, members: set[bytes]) -> None:
        self.members = members
        self.changes: list[HeldChange | None] = []
        self.script: list[Any] = []
        self.commits: list[list[str]] = []
        self.entries: list[list[str]] = []
        self.finishes: list[Any] = []
        self.finished: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def commit(
        self,
        worker: str,
        incarnation: str,
        deliveries: Sequence[job_pb2.Delivery],
        held: HeldChange | None = None,
        entries: Sequence[str] = (),
    ) -> Committed:
        assert (worker, incarnation) == ("w0", "incarnation")
        await self.gate.wait()
        self.commits.append([f"{d.request_id}{d.chunk.start}" for d in deliveries])
        self.changes.append(held)
        self.entries.append([*entries])
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

    running: asyncio.Task[None]

    def __init__(self) -> None:
        self.members: set[bytes] = set()
        """What the index has."""
        self.jobs = ScriptedJobs(self.members)
        self.index = ScriptedIndex(self.members)
        self.held = Held()
        self.outcomes: list[tuple[str, Commit]] = []
        self.becomes: dict[str, RolledBack] = {}
        """What becomes of jobs that have lost something; the others have lost too much."""
        self.claimed_by: dict[str, str] = {}
        """Entries of jobs that run."""
        self.lost: list[tuple[str, int, Mapping[int, int]]] = []
        self.lost_of: list[str] = []
        """The entries of those jobs."""
        self.committer = Committer(
            *(self.jobs, self.index, self.held, "w0", "incarnation", self._settled, self._roll_back),
            lambda request_id: self.claimed_by.get(request_id, ""),
        )

    def _settled(self, delivery: job_pb2.Delivery, _: str, outcome: Commit) -> None:
        self.outcomes.append((f"{delivery.request_id}{delivery.chunk.start}", outcome))

    def _roll_back(self, request_id: str, attempt: int, entry: str, known: Mapping[int, int]) -> RolledBack:
        self.lost.append((request_id, attempt, known))
        self.lost_of.append(entry)
        return self.becomes.get(request_id, RolledBack.TOO_OFTEN)


@asynccontextmanager
async def running_line(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    """One that commits, and tries again at once."""
    monkeypatch.setattr(committer, "RETRY_S", 0.0)
    line = Line()
    line.running = asyncio.create_task(line.committer.run())
    yield line
    line.running.cancel()
    await asyncio.gather(line.running, return_exceptions=True)


def delivery(request_id: str, start: int) -> job_pb2.Delivery:
    chunk = inference_pb2.Chunk(start=start, token_ids=[1])
    return job_pb2.Delivery(request_id=request_id, attempt=1, chunk=chunk)
