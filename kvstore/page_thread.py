"""A thread for a disk. A disk may hang, and whoever gives it up must be able to end without it."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class DiskThread(Executor):
    """Does what it is given, in order. A process that ends does not wait for it, as it would for the threads of other
    executors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Raises RuntimeError after ``shutdown``."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                raise RuntimeError(f"the thread {self._name!r} takes nothing any more")
            self._work.put((future, partial(fn, *args, **kwargs)))
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """It ends when it has done what it was given; with ``cancel_futures``, only what is under way."""
        with self._lock:
            self._ended = True
            if cancel_futures:
                self._cancel_all()
            self._work.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _cancel_all(self) -> None:
        while True:
            try:
                given = self._work.get_nowait()
            except Empty:
                return
            if given is not None:
                given[0].cancel()

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            future, do = given
            if future.set_running_or_notify_cancel():
                try:
                    result = do()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del given, future, do  # nothing is kept while it waits
