"""Workers that are told to leave one after the other, under load: no caller notices."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from octavo.v1.inference_pb2 import GenerateRequest, GetModelRequest, Sampling, Stopping, TokenIds
from ops.client import Client
from tests.integration.gateway.harness import running_gateway
from tests.integration.worker.one_worker import Fleet, running_worker
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvstore.client import Broker
    from ops.answer import Answer
    from worker.step import StepOutput

TOKENS = 50
STREAMS = 36
"""More than all workers run and read ahead at once: some wait in the streams, unread."""


def request(index: int) -> GenerateRequest:
    return GenerateRequest(
        token_ids=TokenIds(ids=range(5 + index, 25 + index)),
        sampling=Sampling(temperature=0.0) if index % 2 else Sampling(temperature=1.0, seed=index),
        stopping=Stopping(max_tokens=TOKENS, ignore_eos=True),
        n=1 + index % 2,
    )


def said(answer: Answer) -> dict[int, tuple[tuple[int, ...], str, str]]:
    """What each choice has said, and how it ended."""
    return {each.index: (tuple(each.token_ids), each.text, each.finish) for each in answer.choices}


class Fleets:
    """Workers that come and go."""

    def __init__(self, broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place = broker, model_dir, tmp_path
        self._monkeypatch = monkeypatch
        self._stack = AsyncExitStack()
        self.all: list[Fleet] = []

    async def start(self, step_s: float) -> Fleet:
        """One more. Each of its steps takes so long, so that there is something left to lose."""
        name = f"w{len(self.all)}"
        running = running_worker(*self._place, name=name, grace=0.1, max_running=2)
        self.all.append(await self._stack.enter_async_context(running))
        step = self.all[-1].worker.engine.step

        def slow_step() -> StepOutput:
            time.sleep(step_s)
            return step()

        self._monkeypatch.setattr(self.all[-1].worker.engine, "step", slow_step)
        return self.all[-1]

    async def close(self) -> None:
        await self._stack.aclose()


async def is_busy(worker: Fleet) -> bool:
    """Whether it has made a few steps."""
    return (worker.metrics.get_sample_value("octavo_step_seconds_count") or 0) >= 5


async def test_workers_are_replaced_one_after_the_other_under_load(
    broker: Broker, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = Fleets(broker, model_dir, tmp_path, monkeypatch)
    try:
        first = await fleets.start(0.0)
        async with running_gateway(broker) as (_, ready, probe), Client(ready.grpc) as client:
            await probe.get_model(GetModelRequest())
            expected = [said(await client.generate(request(index), timeout=30)) for index in range(STREAMS)]
            first.loop.drain()
            await first.running
            old = [await fleets.start(0.01) for _ in range(2)]
            answers = [asyncio.create_task(client.generate(request(index), timeout=50)) for index in range(STREAMS)]
            for worker in old:
                await until(partial(is_busy, worker), within_s=20)
                await fleets.start(0.005)
                worker.loop.drain()
                await worker.running
            found = await asyncio.gather(*answers)
    finally:
        await fleets.close()
    assert [said(answer) for answer in found] == expected
    assert {finish for one in expected for _, _, finish in one.values()} == {"LENGTH"}
    attempts = [answer.usage.attempts for answer in found]
    assert max(attempts) > 1  # and so some were cut off
    left = [worker.metrics.get_sample_value("octavo_jobs_total", {"outcome": "left"}) for worker in old]
    assert all(left)
