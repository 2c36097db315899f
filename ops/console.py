"""What the commands print, and how they end: results to stdout, everything for people to stderr."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ops.tasks import first_of

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C or SIGTERM ended early."""


def emit(line: str) -> None:
    """A line of the result, on stdout, seen at once by whoever reads the pipe."""
    click.echo(line)
    sys.stdout.flush()


def emit_json(value: Any) -> None:
    """A result as JSON, on stdout."""
    emit(json.dumps(value, indent=2))


def note(line: str) -> None:
    """A line from the command itself, on stderr."""
    click.echo(f"octavo: {line}", err=True)


def pass_on(name: str, line: str) -> None:
    """A line that a child process said, on stderr, under the child's name."""
    click.echo(f"{click.style(f'[{name}]', dim=True)} {line}", err=True)


class Loading:
    """Passes on what the processes of a fleet say until `over`; later only what sounds like trouble."""

    def __init__(self) -> None:
        self.over = False

    def sink(self, name: str, line: str) -> None:
        """Takes a line in; a `LineSink`."""
        if not self.over or any(word in line for word in ("WARNING", "ERROR", "CRITICAL", "Traceback", "Error")):
            pass_on(name, line)


class Interrupts:
    """Ctrl-C and SIGTERM as events, while installed. The first asks for an orderly end, the second for one at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def install(self) -> Interrupts:
        """Takes the signals over, in the running loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._note)
        return self

    def _note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does, with KeyboardInterrupt. Other threads than the main one may not say
    so, and are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what runs inside, with one word. What has an orderly end of its own catches
    KeyboardInterrupt first, or takes the signals over in its event loop.

    Raises:
        SystemExit: interrupted.
    """
    with ended_by_sigterm():
        try:
            yield
        except KeyboardInterrupt:
            note("interrupted")
            raise SystemExit(INTERRUPTED) from None


async def unless_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; the first Ctrl-C or SIGTERM cancels it and waits until it has cleaned up.

    Raises:
        SystemExit: interrupted.
    """
    interrupts = Interrupts().install()
    task = asyncio.create_task(work)
    await first_of(asyncio.wait([task]), interrupts.first.wait())
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        note("interrupted")
        raise SystemExit(INTERRUPTED)
    return task.result()
