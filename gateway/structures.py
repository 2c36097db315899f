"""Whether an answer can have the form that a request asks for: tried in processes that may die of it."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gateway.errors import AdmissionError, Overloaded, shown
from gateway.structure_child import LENGTH, MEMORY_BYTES

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from octavo.v1 import inference_pb2

CPU_S: Final = 1.0
"""Processor time for one structure. Not the clock's: what else the machine does is no reason to refuse."""
CHILDREN: Final = 2
"""Structures that are tried at a time: while one takes all of its time, others pass."""
MOST_WAITING: Final = 32
"""Requests whose structures wait to be tried. They wait for some hundredth of a second each, at worst for a second."""
KNOWN: Final = 4096
"""Structures of which it is remembered what came out."""
WALL_S: Final = 20.0
"""A child that has had so little processor time by then is stopped, or worse."""
BY_OTHERS: Final = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""How a child ends that somebody ends: the system, short of memory, or who stops all processes. No structure is to
blame."""
TOO_MUCH: Final = (
    f"takes more than {CPU_S:g} s or {MEMORY_BYTES >> 20} MiB to compile; make it simpler: fewer alternatives, smaller "
    "counts, less nesting"
)


class Structures:
    """Tries structures for one gateway. Its processes begin with the first of them."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}
        """Why each of the last ones is refused, by its digest; empty: it is not."""
        self._idle: list[Process] = []
        self._turn = asyncio.Semaphore(CHILDREN)
        self._waiting = 0

    async def check(self, structure: inference_pb2.Structure) -> None:
        """Raises AdmissionError for what can't be compiled, or takes too much; Overloaded when too many wait."""
        data = structure.SerializeToString(deterministic=True)
        digest = hashlib.sha256(data).digest()
        reason = self._known.get(digest)
        if reason is None:
            reason = self._known[digest] = await self._tried(data)
            if len(self._known) > KNOWN:
                del self._known[next(iter(self._known))]
        if reason:
            kind = structure.WhichOneof("kind")
            assert kind is not None, "admission lets none through that has no kind"
            raise AdmissionError(f"structure.{kind}", shown(getattr(structure, kind)), reason)

    async def close(self) -> None:
        """Ends the processes that do nothing. No call may be open."""
        while self._idle:
            await _ended(self._idle.pop())

    async def _tried(self, data: bytes) -> str:
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} requests wait for their structures to be compiled; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._ask(data)
        finally:
            self._waiting -= 1

    async def _ask(self, data: bytes) -> str:
        child = self._alive() or await _started()
        whole = False
        try:
            async with asyncio.timeout(WALL_S):
                reason = await _answer(child, data)
            whole = True
        except TimeoutError:
            raise Overloaded("the structure could not be compiled in time; try again later") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            if await child.wait() in BY_OTHERS:
                raise Overloaded("the process that compiles structures was ended; try again later") from None
            return TOO_MUCH
        finally:
            if whole:
                self._idle.append(child)
            else:
                await _ended(child)
        return reason

    def _alive(self) -> Process | None:
        """A child that does nothing, if there is one that has not been ended meanwhile."""
        while self._idle:
            child = self._idle.pop()
            if child.returncode is None:
                return child
        return None


async def _started() -> Process:
    """A child that is ready. Raises IncompleteReadError when it ends before that; its stderr, ours, tells why."""
    command = (sys.executable, "-m", "gateway.structure_child", str(CPU_S))
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        await _frame(child)
    except BaseException:
        await _ended(child)
        raise
    return child


async def _answer(child: Process, data: bytes) -> str:
    assert child.stdin is not None
    child.stdin.write(LENGTH.pack(len(data)) + data)
    await child.stdin.drain()
    return (await _frame(child)).decode()


async def _frame(child: Process) -> bytes:
    assert child.stdout is not None
    (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    return await child.stdout.readexactly(length)


async def _ended(child: Process) -> None:
    with suppress(ProcessLookupError):
        child.kill()
    await child.wait()
