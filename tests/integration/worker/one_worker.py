"""One running worker on a real broker with a real (tiny) model, and what a gateway would do to it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from kvstore import token_log
from kvstore.client import BrokerConfig
from kvstore.jobs import Jobs, JobState, Submitted
from kvstore.registry import Registry, new_incarnation
from kvstore.tracing import UNTRACED
from octavo.v1 import job_pb2
from tests.support.waiting import until
from worker import assemble
from worker.config import PagesConfig, WorkerConfig
from worker.loop import WorkerLoop
from worker.metrics import WorkerMetrics
from worker.page_metrics import PageMetrics
from worker.pages import Pages, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvstore.client import Broker
    from kvstore.tracing import Tracing

GATEWAY = "00000000000000aa"
OTHER_GATEWAY = "00000000000000bb"
LONG = 480


class Fleet:
    """One running worker, and what a gateway would do to it."""

    def __init__(
        self,
        broker: Broker,
        worker: assemble.Assembled,
        loop: WorkerLoop,
        running: asyncio.Task[None],
        metrics: CollectorRegistry,
    ) -> None:
        self.broker = broker
        self.jobs = Jobs(broker)
        self.worker = worker
        self.loop = loop
        self.running = running
        self.metrics = metrics

    async def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        seed: int | None = None,
        n: int = 1,
        edit: Callable[[job_pb2.Job], None] = lambda _: None,
        deadline_ms: int | None = None,
        gateway: str = GATEWAY,
        prefill: int = 0,
    ) -> Submitted:
        """A job as a gateway would submit it: every optional field is set. ``edit`` may change it."""
        job = job_pb2.Job(request_id=request_id, model="tiny", prompt_token_ids=prompt, n=n)
        job.sampling.temperature = 0.0 if seed is None else 1.0
        job.sampling.top_p = 1.0
        job.sampling.seed = seed or 0
        job.sampling.repetition_penalty = 1.0
        job.stopping.max_tokens = max_tokens
        job.stopping.ignore_eos = True
        edit(job)
        return await self.jobs.submit(
            job,
            digest=request_id.encode(),
            worker=self.worker.info.id,
            worker_incarnation=self.worker.info.incarnation,
            gateway=gateway,
            deadline_ms=deadline_ms,
            max_queue=64,
            prefill=prefill,
        )

    async def log(self, request_id: str) -> list[job_pb2.Delivery]:
        deliveries, _ = await token_log.read(self.broker, request_id)
        return deliveries

    async def ended(self, request_id: str) -> list[job_pb2.Delivery]:
        """The whole log, once the job has ended."""

        async def has_ended() -> bool:
            record = await self.jobs.get(request_id)
            return record is not None and record.state is JobState.ENDED

        await until(has_ended, within_s=20)
        return await self.log(request_id)

    async def tokens(self, request_id: str, at_least: int) -> None:
        """Returns once the job has produced so many tokens."""

        async def enough() -> bool:
            return sum(len(d.chunk.token_ids) for d in await self.log(request_id)) >= at_least

        await until(enough, within_s=20)

    async def idle(self) -> None:
        """Returns once the engine has given every block back."""

        async def nothing_held() -> bool:
            engine = self.worker.engine
            return not engine.has_work and engine.stats().blocks_used == 0

        await until(nothing_held, within_s=5)
        self.worker.engine.check_integrity()


@asynccontextmanager
async def running_worker(
    broker: Broker,
    model_dir: Path,
    tmp_path: Path,
    *,
    name: str = "w0",
    dtype: str = "float32",
    kv_tokens: int = 2048,
    max_running: int = 8,
    grace: float = 10.0,
    orphan_grace: float = 10.0,
    cache_tokens: int | None = None,
    steal: bool = True,
    pages: PagesConfig | None = None,
    tracing: Tracing = UNTRACED,
    gateway: Broker | None = None,
    ends_with: type[BaseException] | None = None,
) -> AsyncIterator[Fleet]:
    """A worker that drains at the end, or, with `ends_with`, has been made to fail by then. `gateway`: a connection for
    what a gateway does, if not the worker's."""
    config = WorkerConfig(
        id=name,
        broker=BrokerConfig("unused"),
        model=str(model_dir),
        model_name="tiny",
        dtype=dtype,
        device="cpu",
        cache_dir=tmp_path,
        kv_tokens=kv_tokens,
        cache_tokens=cache_tokens,
        max_running=max_running,
        steal=steal,
        pages=pages,
        step_tokens=64,
        threads=1,
        grace=grace,
        orphan_grace=orphan_grace,
    )
    worker = await asyncio.to_thread(assemble.build, config, new_incarnation(), "", lambda _: None)
    await Registry(broker).register(worker.info)
    await Registry(gateway or broker).renew_gateway(GATEWAY)
    metrics = CollectorRegistry()
    outside = None
    if pages is not None:
        outside = Pages(pages, open_store(pages, broker.keys.namespace), worker.form, PageMetrics(metrics))
    loop = WorkerLoop(config, broker, worker.engine, worker.info, worker.card, WorkerMetrics(metrics, tracing), outside)
    running = asyncio.create_task(loop.run())
    try:
        yield Fleet(broker, worker, loop, running, metrics)
    finally:
        loop.drain()
        async with asyncio.timeout(20):
            if ends_with is None:
                await running
            else:
                with pytest.raises(ends_with):
                    await running
        if outside is not None:
            await outside.close()


def joined(log: list[job_pb2.Delivery]) -> list[int]:
    """All token ids of a job with one choice."""
    (tokens,) = by_choice(log).values()
    return tokens


def by_choice(log: list[job_pb2.Delivery]) -> dict[int, list[int]]:
    """Token ids of each choice, after checking that each has contiguous indexes and one terminal delivery, its last."""
    tokens: dict[int, list[int]] = {}
    ended: set[int] = set()
    for delivery in log:
        chunk = delivery.chunk
        assert chunk.choice not in ended, "a delivery after the last"
        own = tokens.setdefault(chunk.choice, [])
        assert chunk.start == len(own), "a gap or a repeat"
        own += chunk.token_ids
        if chunk.finish:
            ended.add(chunk.choice)
    assert ended == tokens.keys()
    return tokens
