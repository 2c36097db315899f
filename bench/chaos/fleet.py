"""A fleet for a nemesis: each process has a proxy of its own to the broker, and comes back when it is ended."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import grpc.aio

from bench.chaos.proxy import Proxy
from bench.chaos.waiting import until
from ops.client import Client
from ops.config import usable_cores
from ops.fleet import STOP_MARGIN_S, Member
from ops.tasks import all_or_first_error, cancel_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from bench.chaos.server import Server
    from ops.child import LineSink
    from ops.config import FleetConfig

SERVED_S: Final = 60.0
"""From the start, or from the end of the faults, until every gateway sees every worker."""
_POLL_S: Final = 0.1


class ChaosFleet:
    """On a started ``server``. An async context manager: inside, all processes serve. ``note`` takes one line at a time
    of what becomes of processes, ``sink`` what they say."""

    def __init__(self, config: FleetConfig, server: Server, sink: LineSink, note: Callable[[str], None]) -> None:
        # Not an embedded broker: the names of workers depend on that.
        self.config = replace(config, redis=server.url, grpc_port=0, metrics_port=0)
        self.server = server
        self.proxies: dict[str, Proxy] = {}
        self.members: dict[str, Member] = {}
        self.gateways = tuple(f"g{index}" for index in range(config.gateways))
        self.workers = tuple(self.config.worker_ids())
        self._sink = sink
        self._note = note
        self._keepers: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ChaosFleet:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def targets(self) -> list[str]:
        """HOST:PORT of every gateway; a gateway that comes back keeps its own."""
        return [str(self.members[name].child.ready["grpc"]) for name in self.gateways]

    def pid(self, name: str) -> int | None:
        """None while it does not run."""
        child = self.members[name].child
        return child.pid if child.running else None

    async def until_back(self, name: str, pid: int) -> None:
        """Until another life of it than that of ``pid`` is ready. Raises TimeoutError after SERVED_S."""

        async def back() -> bool:
            child = self.members[name].child
            return child.running and child.pid != pid and bool(child.ready)

        await until(back, within_s=SERVED_S)

    def endpoints(self) -> Mapping[str, str]:
        """HOST:PORT of the metrics of those that run and are ready, by ``name/pid``: a life of its own."""
        found = {}
        for name, member in self.members.items():
            if member.child.running and member.child.ready:
                found[f"{name}/{member.child.pid}"] = str(member.child.ready["metrics"])
        return found

    async def until_served(self) -> None:
        """Until every gateway sees every worker and says that it serves. Raises TimeoutError after SERVED_S."""
        async with asyncio.timeout(SERVED_S):
            for target in self.targets:
                async with Client(target) as client:
                    while not await self._is_served(client):  # noqa: ASYNC110 - it tells nobody
                        await asyncio.sleep(_POLL_S)

    async def _is_served(self, client: Client) -> bool:
        try:
            seen = {worker.id for worker in await client.workers()}
            return seen >= set(self.workers) and await client.serves()
        except grpc.aio.AioRpcError:
            return False

    async def _start(self) -> None:
        config, cores = self.config, usable_cores()
        arguments = {name: config.gateway_arguments(index) for index, name in enumerate(self.gateways)}
        arguments |= {name: config.worker_arguments(index, cores) for index, name in enumerate(self.workers)}
        for name, words in arguments.items():
            proxy = await self._stack.enter_async_context(Proxy(self.server.port))
            self.server.proxies.append(proxy)
            self.proxies[name] = proxy
            environment = {**os.environ, "OCTAVO_REDIS": proxy.url}
            self.members[name] = Member(name, words, environment, self._sink)
        await all_or_first_error(member.start(config.start_timeout) for member in self.members.values())
        for index, (name, target) in enumerate(zip(self.gateways, self.targets, strict=True)):
            port = int(target.rpartition(":")[2])
            self.members[name].arguments = config.gateway_arguments(index, grpc_port=port)
        self._keepers = [
            asyncio.create_task(member.keep(config.start_timeout, self._note)) for member in self.members.values()
        ]
        await self.until_served()

    async def _stop(self) -> None:
        """Gateways first, as they finish their streams; then workers; what they speak through last."""
        await cancel_all(self._keepers)
        for names in (self.gateways, self.workers):
            members = [self.members[name] for name in names if name in self.members]
            patience = self.config.grace + STOP_MARGIN_S
            await asyncio.gather(*(member.child.stop(patience) for member in members if member.child.running))
        await self._stack.aclose()
