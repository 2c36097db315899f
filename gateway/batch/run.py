"""A batch on its way: so many lines at once, each asked for until it has a result.

Requests are detached: who asks for one again, after it was killed, finds it running or ended.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from gateway.batch import outputs
from gateway.batch.verdicts import MAX_JOBS, judge, request_id
from gateway.client import BrokenStream, retry_after
from kvstore.batches import BatchState, Progress
from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
    from typing import Protocol

    from gateway.batch.journal import Journal
    from gateway.batch.lines import Line
    from kvstore.batches import Batch

    class Caller(Protocol):
        """What of ``gateway.client.Client`` is used."""

        def generate(
            self, request: inference_pb2.GenerateRequest, /
        ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]: ...
        async def cancel(self, request_id: str, /) -> bool: ...


TICK_S: Final = 0.5
"""Between two times that progress is told, and that it is asked whether to go on."""


TURN_S: Final = 30.0
"""So long a batch runs before it looks whether those of others wait."""
STALLED_S: Final = 5.0
"""So long where it waits for something, and no line ends."""
GAVE_WAY: Final = "batches of other tenants have their turn"


@dataclass(slots=True)
class Turn:
    """A part of a run. Times are of a monotonic clock, in seconds."""

    began_s: float
    ended: int
    """Lines that have ended, when that was seen last."""
    moved_s: float
    """When there was one more."""

    def over(self, ended: int, now_s: float, *, waits: bool) -> bool:
        """Whether it is, with so many lines ended. `waits`: some wait for something."""
        if ended != self.ended:
            self.ended, self.moved_s = ended, now_s
        return now_s - self.began_s >= TURN_S or (waits and now_s - self.moved_s >= STALLED_S)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call failed. `wait_s`: what the gateway says to wait; None: it does not say."""

    code: grpc.StatusCode
    message: str
    wait_s: float | None = None


class BatchRun:
    """One worker's run of a batch. `lines`: those without a result, in order, of which `in_flight` run at once. `tell`:
    takes progress, and says in what state the batch is; `others_wait`: whether batches of others do, to which it gives
    way after a turn. Both are called in a thread, and raise what ends the run."""

    def __init__(
        self,
        caller: Caller,
        batch: Batch,
        lines: Iterator[Line],
        journal: Journal,
        tell: Callable[[Progress], BatchState | None],
        others_wait: Callable[[], bool],
        in_flight: int,
    ) -> None:
        self._caller = caller
        self._batch = batch
        self._lines = lines
        self._journal = journal
        self._tell = tell
        self._others_wait = others_wait
        self._gives_way = False
        self._waited_for = batch.progress.trouble if batch.progress.trouble != GAVE_WAY else ""
        """What the last run waited for: told until something is known of this one."""
        self._in_flight = in_flight
        self._open: dict[int, str] = {}
        """Request ids of lines that are under way, by number."""
        self._trouble: dict[int, str] = {}
        """What lines wait for."""
        self._began = time.monotonic()
        self._before = len(journal.tally.ids)

    async def run(self, leave: asyncio.Event) -> bool:
        """Until every line has a result, or the batch is cancelled; then True. False: it was told to leave, or gives
        way, and what it has asked for goes on.

        Raises OSError, and what `tell` raises; requests go on then, too.
        """
        tasks = [asyncio.create_task(self._work()) for _ in range(self._in_flight)]
        working = asyncio.gather(*tasks)
        leaving = asyncio.create_task(leave.wait())
        watching = asyncio.create_task(self._watch())
        try:
            either: list[asyncio.Future[Any]] = [working, leaving, watching]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                if not watching.result():
                    return False
                await cancelled(tasks)
                await self.cancel_open()
                return True
            if working.done():
                working.result()
                return True
            return False
        finally:
            await cancelled((leaving, watching, *tasks))
            await asyncio.gather(working, return_exceptions=True)
            await asyncio.to_thread(self._journal.sync)
            with suppress(Exception):
                await asyncio.to_thread(self._tell, self.progress())

    def progress(self) -> Progress:
        """How far it is."""
        tally, elapsed = self._journal.tally, time.monotonic() - self._began
        return Progress(
            **tally.counts,
            lines_per_s=round((len(tally.ids) - self._before) / max(elapsed, 1e-3), 3),
            trouble=next(iter(self._trouble.values()), self._else_waits_for()),
        )

    def _else_waits_for(self) -> str:
        """Where no line has told what it waits for."""
        told = "" if len(self._journal.tally.ids) > self._before else self._waited_for
        return told or (GAVE_WAY if self._gives_way else "")

    def _new_turn(self) -> Turn:
        now_s = time.monotonic()
        return Turn(now_s, len(self._journal.tally.ids), now_s)

    async def cancel_open(self) -> None:
        """Ends what runs of it: of this run, or of one that was killed, whose lines are the next ones."""
        numbers = {*self._open, *(line.number for line in islice(self._lines, self._in_flight))}
        ids = [request_id(self._batch.id, number, job) for number in sorted(numbers) for job in range(MAX_JOBS)]
        for start in range(0, len(ids), 16):
            ended = asyncio.gather(*(self._caller.cancel(each) for each in ids[start : start + 16]))
            with suppress(grpc.aio.AioRpcError):
                await ended

    async def _watch(self) -> bool:
        """Returns when it is not to go on: True, as the batch is cancelled; False, as others have their turn."""
        turn = self._new_turn()
        while True:
            await asyncio.sleep(TICK_S)
            progress = self.progress()  # only what is synced is told
            await asyncio.to_thread(self._journal.sync)
            # None: the broker has lost it. Its results are wanted all the same.
            if await asyncio.to_thread(self._tell, progress) not in (BatchState.RUNNING, None):
                return True
            ended = len(self._journal.tally.ids)
            if turn.over(ended, time.monotonic(), waits=bool(self._trouble)):
                if await asyncio.to_thread(self._others_wait):
                    self._gives_way = True
                    return False
                turn = self._new_turn()

    async def _work(self) -> None:
        for line in self._lines:
            result = await self._result(line)
            self._journal.append(result)
            # Only now: what has no result is to be cancelled with the batch.
            del self._open[line.number]

    async def _result(self, line: Line) -> dict[str, Any]:
        jobs = failures = 0
        while True:
            request, answer = self._request(line, jobs), outputs.Answer(line, int(time.time()))
            self._open[line.number] = request.request_id
            failure = await self._failure(request, answer)
            if failure is None:
                self._trouble.pop(line.number, None)
                return answer.result(request.request_id, request.model)
            failures += 1
            verdict = judge(failure.code, failure.wait_s, ended=answer.failed, jobs=jobs + 1, failures=failures)
            if verdict is None:
                self._trouble.pop(line.number, None)
                return outputs.failed(line, request.request_id, failure.code, failure.message)
            self._trouble[line.number] = f"{failure.code.name}: {failure.message}"[:500]
            jobs += verdict.new_job
            await asyncio.sleep(verdict.pause_s)

    async def _failure(self, request: inference_pb2.GenerateRequest, answer: outputs.Answer) -> Failure | None:
        """What is wrong with one call for a line; None: `answer` is whole."""
        try:
            async for response in self._caller.generate(request):
                answer.add(response)
        except BrokenStream as error:
            return Failure(grpc.StatusCode.INTERNAL, str(error))
        except grpc.aio.AioRpcError as error:
            if not answer.cancelled:
                return Failure(error.code(), error.details() or error.code().name, retry_after(error))
        # By whoever cancelled this batch before it was resumed.
        return Failure(grpc.StatusCode.CANCELLED, "somebody cancelled it") if answer.cancelled else None

    def _request(self, line: Line, job: int) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(line.request)
        request.request_id = request_id(self._batch.id, line.number, job)
        request.model = request.model or self._batch.settings.model
        request.priority = self._batch.settings.priority
        request.detached = True
        return request


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what still runs and waits until it has ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
