"""A fleet with a gateway for each policy: all policies meet the same workers, in turn, on the same machine."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.scrape import scrape
from ops.child import ChildFailed
from ops.client import Client
from ops.console import Loading
from ops.fleet import SERVED_TIMEOUT_S, STOP_MARGIN_S, Fleet, Member
from ops.tasks import all_or_first_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from ops.config import FleetConfig

SETTLE_S = 10.0
"""After a run, until workers have noticed that nobody wants its answers any more."""
LOOK_S = 0.1


class PolicyFleet:
    """An async context manager. `clients` has one for the gateway of each policy."""

    def __init__(self, settings: FleetConfig, policies: Sequence[str], note: Callable[[str], None]) -> None:
        self._settings = settings
        self._policies = policies
        self._note = note
        self._stack = AsyncExitStack()
        self._fleet: Fleet | None = None
        self.clients: dict[str, Client] = {}

    async def __aenter__(self) -> PolicyFleet:
        """Starts everything.

        Raises:
            ChildFailed: a process ended or took too long; nothing is left running.
            KvError: the broker did not start.
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def redis(self) -> str:
        """URL of the broker."""
        return self._running().redis

    def check(self) -> None:
        """Raises ChildFailed when the broker is gone."""
        lost = self._running().lost
        if lost.done():
            raise ChildFailed(lost.result())

    async def stolen(self) -> int | None:
        """Jobs that workers have taken from each other so far; None where one of them does not tell."""
        workers = await next(iter(self.clients.values())).workers()
        try:
            told = await asyncio.gather(*(asyncio.to_thread(scrape, each.metrics) for each in workers))
        except OSError:
            return None
        return sum(int(each["octavo_stolen_total"]) for each in told)

    async def settle(self) -> None:
        """Waits until no queue has anything left, for a while: a run must not find what the one before left behind."""
        client = next(iter(self.clients.values()))
        deadline = time.monotonic() + SETTLE_S
        while left := sum(queue.undelivered + queue.pending for queue in await client.queues()):
            if time.monotonic() > deadline:
                self._note(f"{left} job(s) of this run are still with the workers")
                return
            # Queues are read, not watched: an end is told to whoever waits for the answer, and nobody does.
            await asyncio.sleep(LOOK_S)

    async def _start(self) -> None:
        loading = Loading()
        first, *others = self._policies
        fleet = Fleet(replace(self._settings, policy=first), loading.sink, self._note)
        self._fleet = await self._stack.enter_async_context(fleet)
        environment = {**os.environ, "OCTAVO_REDIS": fleet.redis}
        members = {policy: self._gateway(policy, environment, loading) for policy in others}
        self._stack.push_async_callback(self._stop, list(members.values()))
        await all_or_first_error(member.start(self._settings.start_timeout) for member in members.values())
        loading.over = True
        targets = {first: fleet.targets[0]} | {
            policy: str(member.child.ready["grpc"]) for policy, member in members.items()
        }
        for policy, target in targets.items():
            self.clients[policy] = await self._stack.enter_async_context(Client(target))
        await all_or_first_error(self._until_served(targets[policy], client) for policy, client in self.clients.items())

    async def _until_served(self, target: str, client: Client) -> None:
        """A gateway learns of workers and models through the broker, moments after it is ready."""
        deadline = time.monotonic() + SERVED_TIMEOUT_S
        # A gateway tells nobody when it has learnt of a worker.
        while len(await client.workers()) < self._settings.workers or not await client.serves():
            if time.monotonic() > deadline:
                raise ChildFailed(f"the gateway at {target} does not see all workers")
            await asyncio.sleep(LOOK_S)

    def _gateway(self, policy: str, environment: dict[str, str], loading: Loading) -> Member:
        settings = replace(self._settings, policy=policy, metrics_port=0)
        return Member(f"gateway of {policy}", settings.gateway_arguments(0, grpc_port=0), environment, loading.sink)

    async def _stop(self, members: Sequence[Member]) -> None:
        running = [member.child for member in members if member.child.running]
        await asyncio.gather(*(child.stop(self._settings.grace + STOP_MARGIN_S) for child in running))

    def _running(self) -> Fleet:
        if self._fleet is None:
            raise RuntimeError("the fleet was not started")
        return self._fleet
