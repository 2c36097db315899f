"""What a worker's heartbeats tell of its work, for those who watch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.registry import Registry
from tests.integration.worker.one_worker import joined, running_worker
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker


async def test_totals_of_steps_and_tokens(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    """A prompt of 40 tokens, twice: the second finds two blocks of 16. First tokens come with the prompts."""
    registry, began = Registry(broker), time.monotonic()
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        for name in ("a", "b"):
            await fleet.submit(name, [*range(5, 45)], 5)
            assert len(joined(await fleet.ended(name))) == 5

        async def told() -> bool:
            (worker,) = await registry.workers()
            return worker.output_tokens == 10

        await until(told, within_s=5)
        (worker,) = await registry.workers()
        assert (worker.prefix_queried, worker.prefix_hit, worker.computed_tokens) == (80, 32, 40 + 4 + 8 + 4)
        assert worker.steps == fleet.metrics.get_sample_value("octavo_step_seconds_count") == 10
        assert 0 < worker.busy_s < time.monotonic() - began
        now = await broker.call("TIME")
        assert abs(worker.heartbeat_ms - int(now[0]) * 1000) < 10_000
