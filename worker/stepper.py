"""The engine in a thread of its own: step follows step, and no step waits for the event loop.

::

    event loop ──add, abort──▶ changes ──▶ (between steps) engine.step ──Stepped──▶ event loop
                               numbered     at most AHEAD of them are not taken yet

Only the thread touches the engine. A step says how many changes it has seen, by which the event loop tells outputs of a
request from those of an earlier one with the same id.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from worker.engine import NOTHING_SAID
from worker.errors import StoppedError, StuckError
from worker.params import AdmissionError, ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Executor

    from kvstore.page import PageName
    from worker.engine import Engine
    from worker.scheduling.block import Event
    from worker.sequence import Request
    from worker.step import EngineStats, StepOutput

AHEAD: Final = 2
"""Steps whose results the event loop has not taken, at most. The next one begins while it takes the last one's."""

END_S: Final = 5.0
"""When a worker ends, a step that is under way has come back by then, or is not waited for."""


class Addition(NamedTuple):
    """A request that the engine is to take in, as ``Engine.add`` has it."""

    request: Request
    said: Mapping[int, Sequence[int]]
    ended: Collection[int]


class Adoption(NamedTuple):
    """Pages of one prefix that the pool is to take in."""

    names: Sequence[PageName]
    payloads: Sequence[memoryview]
    evict: bool
    """Whether others may have to go for them."""
    taken: Callable[[int], None]
    """Called in the event loop with how many of them the pool offers now."""


class Refused(NamedTuple):
    """A request that the engine would not take."""

    change: int
    request_id: str
    error: str
    replay: bool = False
    """It is not the request that is wrong, but what it is said to have said before."""


class Stepped(NamedTuple):
    """What the thread has to tell."""

    stats: EngineStats
    seen: int
    """The number of the last change that the engine knew of."""
    refused: tuple[Refused, ...] = ()
    output: StepOutput | None = None
    """None when the engine has nothing to do any more."""
    began: float = 0.0
    ended: float = 0.0
    """Of the step, on the monotonic clock."""
    events: tuple[Event, ...] = ()
    """What became of the pool's offers, in this step or since the last one."""


Change = Addition | Adoption | str
"""What is to be added or taken in, or the id of what is to be aborted."""


class Stepper:
    """Drives an engine. All methods but ``run`` are the event loop's, and none of them waits."""

    def __init__(self, engine: Engine, tell: Callable[[Stepped], None], leave: Callable[[], int] = lambda: 0) -> None:
        """``tell`` is called in the event loop with what each step has brought; ``taken`` answers it. ``leave`` is
        asked, in the thread, how many evicted blocks may be read as pages."""
        self._engine = engine
        self._leave = leave
        self._tell = tell
        self._lock = threading.Condition()
        self._changes: list[tuple[int, Change]] = []
        self._untaken = 0
        self._idle = True
        """Whether the thread has told that there is nothing to do."""
        self._closed = False
        self.posted = 0
        """The number of the last change."""
        self.step_began: float | None = None
        """Of the step that is under way, on the monotonic clock."""

    def add(
        self, request: Request, said: Mapping[int, Sequence[int]] = NOTHING_SAID, ended: Collection[int] = ()
    ) -> int:
        """The engine gets this request before its next step. Returns the number of the change."""
        return self._post(Addition(request, said, ended))

    def adopt(self, adoption: Adoption) -> int:
        """The pool takes in these pages before the engine gets what is added later. Returns the number of the change.
        Nothing happens where there is no paging."""
        return self._post(adoption)

    def abort(self, request_id: str) -> int:
        """The engine drops this request before its next step, or never gets it. Returns the number of the change."""
        with self._lock:
            kept = [(number, what) for number, what in self._changes if not _adds(what, request_id)]
            if len(kept) < len(self._changes):
                # It has not begun. Whatever ran under its id before was aborted by a change that is kept.
                self._changes = kept
                self.posted += 1
                return self.posted
        return self._post(request_id)

    def taken(self) -> None:
        """A step's results were taken: there is room for those of another."""
        with self._lock:
            self._untaken -= 1
            self._lock.notify()

    def close(self) -> None:
        """``run`` returns after the step that is under way."""
        with self._lock:
            self._closed = True
            self._lock.notify()

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread's: steps until closed. Raises what the engine raises."""
        while (taken := self._next()) is not None:
            seen, changes = taken
            self._engine.ages.now = time.monotonic()
            if self._engine.paging is not None:
                self._engine.paging.leave = self._leave()
            refused = self._apply(changes, loop)
            if self._engine.has_work:
                self.step_began = began = time.monotonic()
                output = self._engine.step()
                self.step_began = None
                stepped = Stepped(output.stats, seen, refused, output, began, time.monotonic(), output.events)
                self._idle = False
            else:
                events = self._engine.take_events()
                if self._idle and not refused and not events:
                    continue
                self._engine.check_integrity()
                stepped = Stepped(self._engine.stats(), seen, refused, events=events)
                self._idle = True
            with self._lock:
                self._untaken += 1
            with suppress(RuntimeError):  # the event loop is closed: nobody is there to be told
                loop.call_soon_threadsafe(self._tell, stepped)

    def _post(self, what: Change) -> int:
        with self._lock:
            self.posted += 1
            self._changes.append((self.posted, what))
            self._lock.notify()
            return self.posted

    def _next(self) -> tuple[int, list[tuple[int, Change]]] | None:
        """Waits until there is something to do, and room for its result. None when closed."""
        with self._lock:
            while not self._closed and (self._untaken >= AHEAD or (self._idle and not self._changes)):
                self._lock.wait()
            changes, self._changes = self._changes, []
            return None if self._closed else (self.posted, changes)

    def _apply(self, changes: list[tuple[int, Change]], loop: asyncio.AbstractEventLoop) -> tuple[Refused, ...]:
        refused = []
        for number, what in changes:
            if isinstance(what, str):
                self._engine.abort(what)
            elif isinstance(what, Adoption):
                self._adopt(what, loop)
            else:
                try:
                    self._engine.add(*what)
                except AdmissionError as error:
                    replay = isinstance(error, ReplayError)
                    refused.append(Refused(number, what.request.request_id, str(error), replay))
        return tuple(refused)

    def _adopt(self, adoption: Adoption, loop: asyncio.AbstractEventLoop) -> None:
        paging, count = self._engine.paging, 0
        if paging is not None:
            count = paging.adopt(adoption.names, adoption.payloads, evict=adoption.evict)
        with suppress(RuntimeError):  # as above
            loop.call_soon_threadsafe(adoption.taken, count)


async def until_back(thread: Executor, *, drained: bool) -> None:
    """Until the engine's thread, which gets nothing more to do, has done what is under way.

    Raises StoppedError, or StuckError where the worker was not `drained`, when that takes longer than END_S: a process
    that ends waits for its threads, and for this one maybe for ever.
    """
    try:
        async with asyncio.timeout(END_S):
            await asyncio.get_running_loop().run_in_executor(thread, lambda: None)
    except TimeoutError:
        error = StoppedError if drained else StuckError
        raise error(f"a step has not come back in the {END_S:g} s of a worker's end") from None


def _adds(what: Change, request_id: str) -> bool:
    return isinstance(what, Addition) and what.request.request_id == request_id
