"""The engine's thread: what it is told, what it tells, and how far it goes ahead."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from kvstore.block_hash import root
from kvstore.page import names_of
from tests.unit.worker.test_journal import make_output
from worker import stepper
from worker.errors import StoppedError, StuckError, WorkerError
from worker.params import AdmissionError, ReplayError, SamplingParams, StopParams
from worker.scheduling.ages import Ages
from worker.scheduling.block import Event, EventKind
from worker.sequence import Request
from worker.step import EngineStats, StepOutput, StepStats
from worker.stepper import AHEAD, Adoption, Refused, Stepped, Stepper, until_back

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from kvstore.page import PageName
    from worker.engine import Engine
    from worker.paging import Paging


class Scripted:
    """An engine that gives one token to each of its requests in every step that the test allows."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.paging: Paging | None = None
        self.running: list[str] = []
        self.allowed = threading.Semaphore(0)
        self.in_step = threading.Semaphore(0)
        self.fails = False
        self.events: tuple[Event, ...] = ()
        self.ages = Ages()

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request, said: Mapping[int, Sequence[int]], ended: Collection[int]) -> None:
        self.calls.append(f"add {request.request_id}" + (f" after {dict(said)}, {[*ended]}" if said or ended else ""))
        if not request.prompt:
            raise AdmissionError("the prompt is empty")
        if 99 in ended:
            raise ReplayError("no such choice")
        self.running.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")
        if request_id in self.running:
            self.running.remove(request_id)

    def step(self) -> StepOutput:
        self.in_step.release()
        assert self.allowed.acquire(timeout=10)
        if self.fails:
            raise RuntimeError("broken")
        self.calls.append("step")
        outputs = tuple(make_output(request_id=request_id) for request_id in self.running)
        count = len(outputs)
        return StepOutput(outputs, StepStats(*[0] * 13, tokens=count, sequences=count, decoded=count))

    def take_events(self) -> tuple[Event, ...]:
        events, self.events = self.events, ()
        return events

    def stats(self) -> EngineStats:
        return EngineStats(*[0] * 13)

    def check_integrity(self) -> None:
        self.calls.append("check")


class World:
    """A stepper with its thread, and what it told."""

    def __init__(self, leave: Callable[[], int]) -> None:
        self.engine = Scripted()
        self.told: asyncio.Queue[Stepped] = asyncio.Queue()
        self.stepper = Stepper(cast("Engine", self.engine), self.told.put_nowait, leave)

    async def step(self) -> Stepped:
        """Lets the engine make one step, and returns what is told of it; the results are not taken yet."""
        self.engine.allowed.release()
        return await self.told.get()

    async def in_step(self) -> None:
        assert await asyncio.to_thread(self.engine.in_step.acquire, timeout=10)


@asynccontextmanager
async def world(ends_with: type[Exception] | None = None, leave: Callable[[], int] = lambda: 0) -> AsyncIterator[World]:
    made = World(leave)
    running = asyncio.create_task(asyncio.to_thread(made.stepper.run, asyncio.get_running_loop()))
    try:
        yield made
    finally:
        made.stepper.close()
        made.engine.allowed.release(10)
        async with asyncio.timeout(10):
            if ends_with is None:
                await running
            else:
                with pytest.raises(ends_with):
                    await running


def request(request_id: str, *prompt: int) -> Request:
    return Request(request_id, prompt, SamplingParams(temperature=0.0), StopParams(max_tokens=4))


async def test_a_step_tells_how_many_changes_it_has_seen() -> None:
    async with world() as w:
        assert w.stepper.add(request("a", 1)) == 1
        await w.in_step()
        assert w.stepper.step_began is not None
        assert w.stepper.add(request("b", 1)) == 2  # during the first step
        first = await w.step()
        assert first.output is not None
        assert (first.seen, [o.request_id for o in first.output.outputs]) == (1, ["a"])
        assert first.began <= first.ended
        await w.in_step()
        second = await w.step()
        assert second.output is not None
        assert (second.seen, [o.request_id for o in second.output.outputs]) == (2, ["a", "b"])


async def test_the_next_step_begins_before_results_are_taken_and_no_third_does() -> None:
    async with world() as w:
        w.stepper.add(request("a", 1))
        for _ in range(AHEAD):
            await w.in_step()
            await w.step()
        w.engine.allowed.release()
        assert not w.engine.in_step.acquire(timeout=0.05)
        w.stepper.taken()
        await w.in_step()
        assert (await w.told.get()).output is not None


async def test_what_is_aborted_before_its_first_step_never_reaches_the_engine() -> None:
    async with world() as w:
        w.stepper.add(request("a", 1))
        await w.in_step()
        w.stepper.add(request("b", 1))
        assert w.stepper.abort("b") == 3
        w.stepper.abort("a")
        w.stepper.add(request("a", 2))
        assert w.stepper.abort("a") == 6
        assert (await w.step()).seen == 1
        w.stepper.taken()
        idle = await w.told.get()
        assert (idle.seen, idle.output) == (6, None)
        assert w.engine.calls == ["add a", "step", "abort a", "check"]


async def test_what_the_engine_refuses_is_told_with_its_change() -> None:
    async with world() as w:
        w.stepper.abort("nobody")
        w.stepper.add(request("empty"))
        told = await w.told.get()
        while not told.refused:
            w.stepper.taken()
            told = await w.told.get()
        assert told.refused == (Refused(2, "empty", "the prompt is empty"),)
        assert told.output is None


async def test_what_a_request_goes_on_from_reaches_the_engine() -> None:
    async with world() as w:
        w.stepper.add(request("a", 1), {0: (7, 8), 1: ()}, {2})
        await w.in_step()
        await w.step()
        assert w.engine.calls == ["add a after {0: (7, 8), 1: ()}, [2]", "step"]


async def test_a_past_that_cannot_be_is_told_from_a_request_that_is_wrong() -> None:
    async with world() as w:
        w.stepper.add(request("a", 1), {}, {99})
        assert (await w.told.get()).refused == (Refused(1, "a", "no such choice", replay=True),)


async def test_idleness_is_told_once_and_accounts_are_checked() -> None:
    async with world() as w:
        w.stepper.add(request("a", 1))
        await w.in_step()
        w.stepper.abort("a")
        await w.step()
        w.stepper.taken()
        assert (await w.told.get()).output is None
        w.stepper.taken()
        w.stepper.abort("a")  # nothing to tell of
        w.stepper.add(request("b", 1))
        await w.in_step()
        assert (await w.step()).output is not None
        assert w.engine.calls.count("check") == 1


async def test_what_an_idle_pool_gives_up_is_told() -> None:
    """An abort after the last step may evict: nobody would hear of it before the next job."""
    async with world() as w:
        w.stepper.add(request("a", 1))
        await w.in_step()
        w.stepper.abort("a")
        w.engine.events = (Event(EventKind.CLEARED),)
        await w.step()
        w.stepper.taken()
        idle = await w.told.get()
        assert (idle.output, idle.events) == (None, (Event(EventKind.CLEARED),))
        w.stepper.taken()
        w.engine.events = (Event(EventKind.CLEARED),)
        w.stepper.abort("a")  # wakes the thread
        assert (await w.told.get()).events == (Event(EventKind.CLEARED),)


async def test_what_the_engine_raises_ends_the_thread() -> None:
    async with world(ends_with=RuntimeError) as w:
        w.engine.fails = True
        w.stepper.add(request("a", 1))
        await w.in_step()
        w.engine.allowed.release()


class ScriptedPaging:
    """Takes what it is given, and notes in which order."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.leave = 0

    def adopt(self, names: Sequence[PageName], payloads: Sequence[memoryview], *, evict: bool) -> int:
        assert len(names) == len(payloads)
        self.calls.append(f"adopt {len(names)}, leave {self.leave}, evict {evict}")
        return len(names)


async def test_pages_are_taken_in_before_what_is_added_after_them() -> None:
    async with world(leave=lambda: 7) as w:
        w.engine.paging = cast("Paging", ScriptedPaging(w.engine.calls))
        names = names_of(root("f", 4), tuple(range(8)), 4)
        taken: asyncio.Queue[int] = asyncio.Queue()
        for evict, some in ((True, names), (False, names[:1])):
            w.stepper.adopt(Adoption(some, [memoryview(b"")] * len(some), evict, taken.put_nowait))
        w.stepper.add(request("a", 1))
        assert [await taken.get(), await taken.get()] == [2, 1]
        await w.in_step()
        # With nothing to do it takes them too; and what is aborted has no part in it.
        w.stepper.abort("a")
        await w.step()
        w.stepper.taken()
        w.stepper.adopt(Adoption(names, [memoryview(b"")] * 2, False, taken.put_nowait))
        assert await taken.get() == 2
        assert [call for call in w.engine.calls if call != "check"] == [
            "adopt 2, leave 7, evict True",
            "adopt 1, leave 7, evict False",
            *("add a", "step", "abort a"),
            "adopt 2, leave 7, evict False",
        ]


async def test_without_paging_pages_are_let_go() -> None:
    async with world() as w:
        taken: asyncio.Queue[int] = asyncio.Queue()
        w.stepper.adopt(Adoption([], [], True, taken.put_nowait))
        assert await taken.get() == 0


@pytest.mark.parametrize(("drained", "error"), [(True, StoppedError), (False, StuckError)])
async def test_a_long_step_is_a_failure_only_of_a_worker_that_was_not_told_to_leave(
    monkeypatch: pytest.MonkeyPatch, drained: bool, error: type[WorkerError]
) -> None:
    monkeypatch.setattr(stepper, "END_S", 0.05)
    comes_back = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(comes_back.wait)
        try:
            with pytest.raises(error, match=r"has not come back in the 0\.05 s"):
                await until_back(thread, drained=drained)
        finally:
            comes_back.set()
