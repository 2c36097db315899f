"""A process of the fleet: started, listened to, ended.

Its stdout carries one line `ready {json}`; everything else that it says is for people and passed on, line by line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore.embedded import follow_parent
from ops.tasks import cancel_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

LineSink = Callable[[str, str], None]
"""Takes (name of the process, one line of what it said)."""

MAX_LINE = 8192
"""Characters of one line that are kept; the rest of a longer one is dropped."""
LAST_WORDS_S = 1.0
"""How long the pipes of a process that ended may stay open."""


class ChildFailed(Exception):  # noqa: N818 - an event, not a kind of error
    """A process ended, or said nothing in time, before it was ready. What it said itself has gone to its sink."""


class Child:
    """One process and what it said. `ready` is its `ready` line once `wait_ready` returned."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], sink: LineSink) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.ready: dict[str, Any] = {}
        self._spoke = False
        self._environment = dict(environment)
        self._sink = sink
        self._process: asyncio.subprocess.Process | None = None
        self._said_ready = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def running(self) -> bool:
        """False before the start, too."""
        return self._process is not None and self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._running().returncode

    async def start(self) -> None:
        """Starts it, in a session of its own: Ctrl-C in the terminal reaches only the parent, which ends it in order.

        It runs the interpreter that runs us, without the current folder on its import path (`-P`): a folder named
        `worker` beside the user must not be taken for ours. The kernel ends it when we end, in whatever way.
        """
        command = follow_parent([sys.executable, "-P", "-m", *self.arguments])
        # Pipes of our own: asyncio's would keep `wait` from returning while anybody else holds their other end.
        out, err = os.pipe(), os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out[1],
                stderr=err[1],
                env=self._environment,
                start_new_session=True,
            )
        finally:
            os.close(out[1])
            os.close(err[1])
            self._readers = [
                asyncio.create_task(self._read(out[0], may_be_ready=True)),
                asyncio.create_task(self._read(err[0], may_be_ready=False)),
            ]

    async def wait_ready(self, timeout: float) -> None:
        """Waits for the `ready` line, `timeout` seconds at most.

        Raises:
            ChildFailed: it ended first, or took too long.
        """
        ended = asyncio.create_task(self.wait())
        ready = asyncio.create_task(self._said_ready.wait())
        try:
            await asyncio.wait({ended, ready}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._said_ready.is_set() and self.returncode is None:
                return
            if ended.done():
                how = describe_exit(ended.result())
                raise ChildFailed(f"{self.name} {how} before it was ready{self._hint()}")
            raise ChildFailed(f"{self.name} was not ready within {timeout:g} s{self._hint()}")
        finally:
            await cancel_all((ended, ready))

    async def wait(self) -> int:
        """Waits for its end and for the last of what it said. Returns the exit status."""
        status = await self._running().wait()
        # A process of its own that inherited the pipes may keep them open: what that says later is not waited for.
        _, late = await asyncio.wait(self._readers, timeout=LAST_WORDS_S)
        await cancel_all(late)
        return status

    async def stop(self, timeout: float) -> bool:
        """Asks it to end (SIGTERM) and kills it when `timeout` seconds were not enough. True: it ended by itself."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._running().wait(), timeout)
        except TimeoutError:
            await self.kill()
            return False
        await self.wait()
        return True

    async def kill(self) -> None:
        """Ends it at once and waits until it is gone. May be called when it has ended."""
        self.signal(signal.SIGKILL)
        await self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing happens when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._running().send_signal(number)

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    def _hint(self) -> str:
        """The sink has shown the reason already, if one was told."""
        return f"; see what [{self.name}] said above" if self._spoke else ""

    async def _read(self, descriptor: int, *, may_be_ready: bool) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            async for line in lines(stream):
                facts = parse_ready(line) if may_be_ready else None
                if facts is not None:
                    self.ready = facts
                    self._said_ready.set()
                elif line:
                    self._spoke = True
                    # Whoever listened may be gone. The process must not come to a halt on a full pipe for that.
                    with contextlib.suppress(OSError):
                        self._sink(self.name, line)
        finally:
            transport.close()


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a stream without their ends, long ones cut to `MAX_LINE`; a carriage return ends a line as well."""
    held = b""
    while chunk := await stream.read(65536):
        *whole, held = (held + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield line[:MAX_LINE].decode(errors="replace").rstrip()
        held = held[:MAX_LINE]
    if held:
        yield held.decode(errors="replace").rstrip()


def parse_ready(line: str) -> dict[str, Any] | None:
    """What a line `ready {json}` tells; None for any other line."""
    if not line.startswith("ready {"):
        return None
    try:
        facts = json.loads(line.removeprefix("ready "))
    except json.JSONDecodeError:
        return None
    return facts if isinstance(facts, dict) else None


def describe_exit(status: int) -> str:
    """`exited with status 3`, `was ended by SIGKILL`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
