"""A gateway in this process, a simulated worker and workers of batches in their own, on a real broker."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from gateway.batch import batches
from gateway.batch.batches import Place
from kvstore import batch_queue
from kvstore.batches import Batch, BatchState, BatchStore, Settings
from kvstore.embedded import find_server
from ops.child import Child
from ops.cli import main
from tests.integration.gateway.harness import running_gateway
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvstore.client import Broker

START_S = 30.0
END_S = 45.0


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here: what differs between them is tested with kvstore."""
    return find_server()


@pytest.fixture
def store(broker: Broker) -> BatchStore:
    return BatchStore(broker.config.url, broker.keys.namespace)


class World:
    """A fleet and its batches."""

    def __init__(self, broker: Broker, store: BatchStore, folder: Path) -> None:
        self.broker = broker
        self.store = store
        self.place = Place(store, folder)
        self.said: list[str] = []
        self.http = ""
        """Where the gateway serves HTTP, if it does."""
        self._environment = {
            **os.environ,
            "OCTAVO_REDIS": broker.config.url,
            "OCTAVO_NAMESPACE": broker.keys.namespace,
            "OCTAVO_BATCHES": str(folder),
            "OCTAVO_TIDY_EVERY": "0",
        }

    @asynccontextmanager
    async def process(self, name: str, *arguments: str) -> AsyncIterator[Child]:
        """A process of the fleet that is ready; killed at the end, unless it has ended."""
        child = Child(name, arguments, self._environment, lambda who, line: self.said.append(f"[{who}] {line}"))
        await child.start()
        try:
            await child.wait_ready(START_S)
            yield child
        finally:
            await child.kill()

    @asynccontextmanager
    async def fleet(self, model: str = "simulated:1000000,2", **gateway: Any) -> AsyncIterator[str]:
        """A gateway and a worker; where the gateway listens."""
        sizes = ("--kv-tokens", "8192", "--metrics-port", "0")
        async with (
            self.process("w0", "worker", "--id", "w0", "--model", model, *sizes),
            running_gateway(self.broker, **gateway) as (_, ready, _),
        ):
            self._environment["OCTAVO_TARGET"] = ready.grpc
            self.http = ready.http or ""
            yield ready.grpc

    def batch_worker(self, name: str = "b0", *arguments: str) -> Any:
        """A worker of batches."""
        return self.process(name, "ops.cli", "batch", "worker", *arguments)

    async def submit(self, *lines: dict[str, Any], **settings: Any) -> str:
        raw = [json.dumps(each).encode() + b"\n" for each in lines]
        batch = await asyncio.to_thread(batches.submit, self.place, raw, Settings(**settings))
        return batch.id

    async def status(self, batch_id: str) -> Batch:
        return await asyncio.to_thread(batches.status, self.store, batch_id)

    async def until(self, batch_id: str, condition: Callable[[Batch], bool], within_s: float = END_S) -> Batch:
        """The batch, once the condition holds."""

        async def holds() -> bool:
            return condition(await self.status(batch_id))

        try:
            await until(holds, within_s=within_s)
        except TimeoutError:
            raise AssertionError(f"{await self.status(batch_id)}\n" + "\n".join(self.said)) from None
        return await self.status(batch_id)

    async def ended(self, batch_id: str) -> Batch:
        return await self.until(batch_id, lambda batch: batch.state.ended)

    def results(self, batch_id: str) -> list[dict[str, Any]]:
        return [json.loads(each) for each in batches.results(self.place, batch_id)]

    async def workers_are_idle(self) -> bool:
        """Whether there is a worker of batches, and all have told rq that they are done."""
        seen = await asyncio.to_thread(batch_queue.workers, self.store)
        return {each.state for each in seen} == {"idle"}

    async def octavo(self, *arguments: str) -> str:
        """What `octavo batch` prints."""
        runner, environment = CliRunner(), self._environment
        ran = await asyncio.to_thread(runner.invoke, main, ["batch", *arguments], env=environment)
        assert ran.exit_code == 0, ran.output
        return str(ran.stdout)

    async def ledger(self) -> dict[str, int]:
        """What became of all requests that were ever accepted."""
        found = await self.broker.call("HGETALL", self.broker.keys.ledger)
        return {name.decode(): int(count) for name, count in found.items()}


@pytest.fixture
async def world(broker: Broker, store: BatchStore, tmp_path: Path) -> AsyncIterator[World]:
    """Without processes."""
    yield World(broker, store, tmp_path / "batches")
    for batch_id in await asyncio.to_thread(store.open_ids):
        await asyncio.to_thread(store.end, batch_id, BatchState.CANCELLED)
    store.close()


def short(number: int, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A line in the short form."""
    sizes = {"max_tokens": tokens, "ignore_eos": True}
    return {"id": f"l{number}", "prompt": f"Line {number} of a book", **sizes, **fields}
