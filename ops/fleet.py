"""A fleet on this machine: broker, gateways and workers as child processes, kept alive and ended in order.

    async with Fleet(config) as fleet:      # all are ready, the gateways serve the model
        fleet.targets[0]                    # HOST:PORT of the first gateway

A process that ends unasked comes back after a pause that grows while it keeps failing. The embedded broker can't: what
was accepted is gone with it, so its end is the fleet's (`lost`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import psutil

from kvstore.embedded import EmbeddedBroker
from kvstore.translation import shown_url
from ops import ports, precheck
from ops.child import Child, ChildFailed, LineSink, describe_exit
from ops.client import Client, describe
from ops.config import usable_cores
from ops.reach import Target
from ops.tasks import all_or_first_error, cancel_all

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import TracebackType

    from gateway.access import Access
    from ops.config import FleetConfig

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
HEALTHY_S = 60.0
"""A process that lived this long starts again with the first pause."""
STOP_MARGIN_S = 10.0
"""Beyond the grace time that a process gets for its streams, before it is killed."""
SERVED_TIMEOUT_S = 20.0
"""From `ready` of every process until the gateways see every worker."""
BROKER_WATCH_S = 1.0


class Member:
    """One process of the fleet through all its lives."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], sink: LineSink) -> None:
        self.name = name
        self.arguments = arguments
        self._environment = environment
        self._sink = sink
        self.child = self._new()

    @property
    def facts(self) -> dict[str, Any]:
        """What its `ready` line told, and its pid."""
        return {"name": self.name, "pid": self.child.pid, **self.child.ready}

    async def start(self, timeout: float) -> None:
        """Starts a new life and waits until it is ready.

        Raises:
            ChildFailed: it ended first or took too long.
        """
        self.child = self._new()
        await self.child.start()
        await self.child.wait_ready(timeout)

    async def keep(self, timeout: float, note: Callable[[str], None]) -> None:
        """Starts it again whenever it ends, until cancelled; how often in a row it had to be is told."""
        pause, failed = FIRST_PAUSE_S, 0
        while True:
            born = time.monotonic()
            status = await self.child.wait()
            note(f"{self.name} (pid {self.child.pid}) {describe_exit(status)}")
            if time.monotonic() - born > HEALTHY_S:
                pause, failed = FIRST_PAUSE_S, 0
            while True:
                failed += 1
                often = f"; it has failed {failed} times in a row" if failed > 1 else ""
                note(f"starting {self.name} again in {pause:g} s{often}")
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
                try:
                    await self.start(timeout)
                except OSError as failure:
                    note(f"{self.name} could not be started: {failure}")
                except ChildFailed as failure:
                    note(str(failure))
                    await self.child.kill()
                else:
                    note(f"{self.name} is back (pid {self.child.pid})")
                    break

    def _new(self) -> Child:
        return Child(self.name, self.arguments, self._environment, self._sink)


class Fleet:
    """Processes by kind. `note` takes one line at a time of what the fleet itself has to say."""

    def __init__(
        self, config: FleetConfig, sink: LineSink, note: Callable[[str], None], access: Access | None = None
    ) -> None:
        self.config = config
        self.redis = config.redis
        self.gateways: list[Member] = []
        self.workers: list[Member] = []
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason when the fleet can't go on."""
        self._sink = sink
        self._note = note
        self._access = access
        self._broker: EmbeddedBroker | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._held: list[socket.socket] = []

    async def __aenter__(self) -> Fleet:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def targets(self) -> list[str]:
        """HOST:PORT of every gateway; one for all that share it."""
        return list(dict.fromkeys(str(member.child.ready["grpc"]) for member in self.gateways))

    def facts(self) -> dict[str, Any]:
        """For the machine-readable `ready` line. A password in the broker's URL is left out."""
        return {
            "targets": self.targets,
            "redis": shown_url(self.redis),
            "namespace": self.config.namespace,
            "gateways": [member.facts for member in self.gateways],
            "workers": [member.facts for member in self.workers],
        }

    async def start(self, begins: Callable[[], object] = lambda: None) -> None:
        """Starts everything at once and returns when the gateways serve the model with every worker. `begins` is called
        when nothing speaks against it, before the first process.

        The workers prepare the model behind a lock of their own: the first converts it, the others wait and load.

        Raises:
            click.ClickException: it can't be as it was asked for; nothing was started.
            ChildFailed: a process ended or took too long; nothing is left running.
            KvError: the broker did not start.
        """
        await precheck.check(self.config)
        self.config, self._held = ports.shared(self.config, precheck.listens_on())
        begins()
        try:
            await self._start_broker()
            await self._start_members()
            await asyncio.gather(*(self._until_served(target) for target in self.targets))
        except BaseException:
            self.kill()
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends the fleet in order: gateways finish their streams, then workers leave, then the broker goes.

        What outlives its grace time is killed. May be called again.
        """
        await cancel_all(self._keepers)
        self._keepers.clear()
        for members in (self.gateways, self.workers):
            await asyncio.gather(*(self._stop_member(member) for member in members))
        if self._broker is not None:
            await self._broker.stop()
            self._broker = None
        for port in self._held:
            port.close()
        self._held.clear()

    def kill(self) -> None:
        """Ends every process at once. `stop` is still to be called, and returns soon."""
        for member in (*self.gateways, *self.workers):
            if member.child.running:
                member.child.signal(signal.SIGKILL)

    async def _start_broker(self) -> None:
        if self.config.redis:
            return
        self._broker = EmbeddedBroker()
        try:
            self.redis = await self._broker.start()
        except FileNotFoundError as error:
            raise ChildFailed(str(error)) from error

    async def _start_members(self) -> None:
        config, cores = self.config, usable_cores()
        # The broker's URL may carry a password: it goes through the environment, which other users can't list.
        environment = {**os.environ, "OCTAVO_REDIS": self.redis, "OCTAVO_PAGES_REDIS": config.pages_redis}
        for index in range(config.gateways):
            self.gateways.append(Member(f"g{index}", config.gateway_arguments(index), environment, self._sink))
        for index, worker in enumerate(config.worker_ids()):
            self.workers.append(Member(worker, config.worker_arguments(index, cores), environment, self._sink))
        members = [*self.gateways, *self.workers]
        # Of gateways that share a port none can be asked by itself whether it serves: each does when it starts, if the
        # workers are there by then.
        for together in (self.workers, self.gateways) if config.one_port else (members,):
            await all_or_first_error(member.start(config.start_timeout) for member in together)
        for index, member in enumerate(self.gateways):
            http = member.child.ready.get("http")
            member.arguments = config.gateway_arguments(
                index, port_of(member.child.ready["grpc"]), None if http is None else port_of(http)
            )
        self._keepers = [asyncio.create_task(member.keep(config.start_timeout, self._note)) for member in members]
        if self._broker is not None:
            self._keepers.append(asyncio.create_task(self._watch_broker(self._broker.pid)))

    async def _watch_broker(self, pid: int | None) -> None:
        while pid is not None and is_alive(pid):  # noqa: ASYNC110 - the process is not ours to wait for
            await asyncio.sleep(BROKER_WATCH_S)
        self.lost.set_result(f"the embedded broker (pid {pid}) ended, and all accepted work with it")

    async def _until_served(self, target: str) -> None:
        """A gateway learns of workers and models through the broker, moments after they are ready."""
        wanted = {member.name for member in self.workers}
        deadline = time.monotonic() + SERVED_TIMEOUT_S
        async with Client(Target(target, self._access)) as client:
            while True:
                try:
                    reason = "" if await client.serves() else "its health service says so"
                    missing = wanted - await self._seen(client, wanted)
                    reason = f"workers not seen: {', '.join(sorted(missing))}" if missing else reason
                except grpc.aio.AioRpcError as error:
                    reason = describe(error)
                if not reason:
                    return
                if time.monotonic() > deadline:
                    raise ChildFailed(
                        f"the gateway at {target} serves no model after {SERVED_TIMEOUT_S:g} s ({reason})"
                    )
                await asyncio.sleep(0.05)

    async def _seen(self, client: Client, wanted: set[str]) -> set[str]:
        """The workers that a gateway knows; those that it should know, where it tells them to operators alone."""
        try:
            await client.model()
            return {worker.id for worker in await client.workers()}
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                return wanted
            raise

    async def _stop_member(self, member: Member) -> None:
        if not member.child.running:
            return
        if not await member.child.stop(self.config.grace + STOP_MARGIN_S):
            self._note(f"{member.name} did not end in time and was killed")


def port_of(address: str) -> int:
    """The port of HOST:PORT."""
    return int(address.rpartition(":")[2])


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
