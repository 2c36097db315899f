"""Does what a schedule says: to processes by their pid, to the broker, and through the proxies between them."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import psutil

from bench.chaos.duplicates import duplicate
from bench.chaos.schedule import Kind
from kvstore.errors import KvError
from kvstore.scripts import load_scripts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from bench.chaos.proxy import Proxy
    from bench.chaos.schedule import Fault
    from kvstore.client import Broker

SLOW_S: Final = 0.2
TORN_S: Final = 1.0
"""What an append-only file that is synced every second may lose."""
LOSE_WITHIN_S: Final = 5.0
"""For so long a reply that is to be lost is waited for."""
WRITES: Final = ("submit", "claim", "commit", "finish")
"""Scripts whose replies are lost."""
DONE: Final = "done"


class Processes(Protocol):
    """Who is who now: a process that was started again has another pid."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Their names."""

    def pid(self, name: str) -> int | None:
        """None while there is none."""

    async def until_back(self, name: str, pid: int) -> None:
        """Until another life of it than that of ``pid`` serves. Raises TimeoutError."""


class Killable(Protocol):
    """The broker's server, as ``bench.chaos.server.Server``."""

    @property
    def running(self) -> bool: ...
    async def start(self, *, empty: bool = False) -> None: ...
    async def kill(self, *, lose_s: float = 0.0) -> None: ...
    async def connect(self, namespace: str) -> Broker: ...


class Skipped(Exception):  # noqa: N818 - says what happened
    """There was nothing to strike."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault as it really was. Times in seconds since the start of the run."""

    fault: Fault
    at_s: float
    healed_s: float
    outcome: str
    """DONE, in more words where there is more to say; or why it was not."""

    @property
    def done(self) -> bool:
        return self.outcome.startswith(DONE)

    def __str__(self) -> str:
        return f"{self.fault}  -> {self.at_s:.1f} to {self.healed_s:.1f} s, {self.outcome}"


class Nemesis:
    """Strikes one fleet. ``proxies``: by the name of the process that each is for."""

    def __init__(
        self,
        *,
        processes: Processes,
        server: Killable,
        proxies: Mapping[str, Proxy],
        namespace: str,
        seed: int,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._processes = processes
        self._server = server
        self._proxies = proxies
        self._namespace = namespace
        self._numbers = random.Random(f"nemesis/{seed}")
        self._note = note
        self._frozen: dict[str, psutil.Process] = {}
        self._began = 0.0

    @property
    def began_at(self) -> float:
        """When ``run`` was called, as ``time.monotonic`` tells it."""
        return self._began

    async def run(self, faults: Iterable[Fault]) -> list[Struck]:
        """Each at its time; returns when the last is healed. All is healed, too, when it is cancelled or fails."""
        self._began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(fault)) for fault in faults]
        finally:
            await self.heal()
        return sorted((task.result() for task in tasks), key=lambda struck: struck.at_s)

    async def heal(self) -> None:
        """Ends all that still lasts. Idempotent."""
        for process in self._frozen.values():
            if process.is_running():
                process.resume()
        self._frozen.clear()
        for proxy in self._proxies.values():
            proxy.heal()
        if not self._server.running:
            await self._server.start()

    async def _one(self, fault: Fault) -> Struck:
        await asyncio.sleep(max(0.0, fault.at_s - self._now()))
        began = self._now()
        try:
            outcome = await self._strike(fault)
        except (Skipped, KvError, OSError, psutil.Error) as error:
            outcome = f"skipped: {error}"
        struck = Struck(fault, began, self._now(), outcome)
        self._note(str(struck))
        return struck

    async def _strike(self, fault: Fault) -> str:
        """Strikes, waits and heals. Raises what ``_one`` takes for a fault that could not be done."""
        ways: dict[Kind, Callable[[Fault], Awaitable[str | None]]] = {
            Kind.WORKER_KILL: self._kill,
            Kind.GATEWAY_KILL: self._kill,
            Kind.WORKER_TERM: self._term,
            Kind.GATEWAY_TERM: self._term,
            Kind.WORKERS_ROLL: self._roll,
            Kind.WORKER_FREEZE: self._freeze,
            Kind.GATEWAY_FREEZE: self._freeze,
            Kind.WORKER_CUT: lambda fault: self._cut([self._proxies[fault.target]], fault),
            Kind.GATEWAY_CUT: lambda fault: self._cut([self._proxies[fault.target]], fault),
            Kind.BROKER_CUT: lambda fault: self._cut(self._proxies.values(), fault),
            Kind.BROKER_KILL: self._down,
            Kind.BROKER_TORN: self._down,
            Kind.BROKER_LOSS: self._down,
            Kind.BROKER_FLUSH: lambda _: self._command("FLUSHALL"),
            Kind.BROKER_PAUSE: self._pause,
            Kind.BROKER_SLOW: self._slow,
            Kind.LOST_REPLY: self._lose_reply,
            Kind.RESET: self._reset,
            Kind.DUPLICATE: self._duplicate,
        }
        more = await ways[fault.kind](fault)
        return f"{DONE}: {more}" if more else DONE

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _process(self, name: str) -> psutil.Process:
        pid = self._processes.pid(name)
        if pid is None:
            raise Skipped(f"{name} does not run")
        return psutil.Process(pid)

    async def _kill(self, fault: Fault) -> str:
        process = self._process(fault.target)
        process.kill()
        return f"pid {process.pid}"

    async def _term(self, fault: Fault) -> str:
        process = self._process(fault.target)
        process.terminate()
        return f"pid {process.pid}"

    async def _roll(self, _: Fault) -> str:
        rolled = []
        for name in self._processes.workers:
            process = self._process(name)
            process.terminate()
            try:
                await self._processes.until_back(name, process.pid)
            except TimeoutError:
                raise Skipped(f"{name} (pid {process.pid}) did not come back") from None
            rolled.append(f"{name} (pid {process.pid})")
        return ", then ".join(rolled)

    async def _freeze(self, fault: Fault) -> str:
        process = self._process(fault.target)
        process.suspend()
        self._frozen[fault.target] = process
        await asyncio.sleep(fault.duration_s)
        del self._frozen[fault.target]
        if not process.is_running():  # or its pid is another's by now
            return f"pid {process.pid} was ended meanwhile"
        process.resume()
        return f"pid {process.pid}"

    async def _cut(self, proxies: Iterable[Proxy], fault: Fault) -> None:
        cut = list(proxies)
        for proxy in cut:
            proxy.cut()
        await asyncio.sleep(fault.duration_s)
        for proxy in cut:
            proxy.join()

    async def _slow(self, fault: Fault) -> None:
        for proxy in self._proxies.values():
            proxy.delay_s = SLOW_S
        await asyncio.sleep(fault.duration_s)
        for proxy in self._proxies.values():
            proxy.delay_s = 0.0

    async def _reset(self, _: Fault) -> None:
        for proxy in self._proxies.values():
            proxy.reset()

    async def _lose_reply(self, _: Fault) -> str:
        name = self._numbers.choice(WRITES)
        marker = load_scripts()[name].sha1.encode()
        losing = {process: proxy.lose_reply(marker) for process, proxy in self._proxies.items()}
        await asyncio.wait(losing.values(), timeout=LOSE_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        lost = [process for process, done in losing.items() if done.done()]
        for each in losing.values():
            each.cancel()
        if not lost:
            raise Skipped(f"nobody called {name} in {LOSE_WITHIN_S:g} s")
        return f"of {name}, by {' '.join(lost)}"

    async def _down(self, fault: Fault) -> None:
        if not self._server.running:
            raise Skipped("the broker does not run")
        torn = min(TORN_S, fault.duration_s) if fault.kind is Kind.BROKER_TORN else 0.0
        await self._server.kill(lose_s=torn)
        await asyncio.sleep(fault.duration_s - torn)
        await self._server.start(empty=fault.kind is Kind.BROKER_LOSS)

    async def _pause(self, fault: Fault) -> None:
        await self._command("CLIENT", "PAUSE", round(fault.duration_s * 1000), "ALL")
        await asyncio.sleep(fault.duration_s)

    async def _command(self, *command: str | int) -> None:
        broker = await self._connect()
        try:
            await broker.call(*command, retry=False)
        finally:
            await broker.close()

    async def _duplicate(self, _: Fault) -> str:
        broker = await self._connect()
        try:
            done = await duplicate(broker, self._numbers)
        finally:
            await broker.close()
        if not done:
            raise Skipped("nobody runs a job")
        return done

    async def _connect(self) -> Broker:
        if not self._server.running:
            raise Skipped("the broker does not run")
        return await self._server.connect(self._namespace)
