"""Pages in doubt don't outlive their worker, however it ends."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import pytest

from kvstore.page import names_of
from octavo.v1 import inference_pb2
from tests.integration.worker.one_worker import running_worker
from tests.integration.worker.paging import A, B, Told, ask
from tests.support.waiting import until
from worker.config import PagesConfig
from worker.errors import LeaseLostError
from worker.pages import open_store
from worker.spill import Spill

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.client import Broker
    from tests.integration.worker.one_worker import Fleet
    from worker.step import StepRow

pytestmark = pytest.mark.usefixtures("patient")

BAD = 300
"""A token that neither prompt has."""


def poison(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed with that token is not finite."""
    runner = fleet.worker.engine._forward._runner
    forward = runner.forward

    def poisoned(rows: Sequence[StepRow]) -> object:
        logits = forward(rows)
        if any(BAD in row.token_ids for row in rows):
            logits[:] = math.nan
        return logits

    monkeypatch.setattr(runner, "forward", poisoned)


@pytest.mark.parametrize("drained", [True, False])
async def test_they_are_deleted_at_the_end_whoever_else_has_not(
    broker: Broker, broker_url: str, model_dir: Path, tmp_path: Path, drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.pages.WARM_SHARE", 0.0)
    config = PagesConfig(redis=broker_url)
    async with running_worker(broker, model_dir, tmp_path, pages=config) as fleet:
        cold = [(await ask(fleet, prompt)).tokens for prompt in (A, B)]
        form, root = fleet.worker.form, fleet.worker.engine.root_of("")
    store = open_store(config, broker.keys.namespace)
    chains = [[name.hash for name in names_of(root, prompt, form.block_size)] for prompt in (A, B)]

    async def covered() -> list[int]:
        return [await store.covered(form.fingerprint, chain) for chain in chains]

    async def never(_: Spill) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Spill, "run", never)
    failing = None if drained else LeaseLostError
    async with running_worker(broker, model_dir, tmp_path, pages=config, ends_with=failing) as fleet:
        poison(fleet, monkeypatch)
        assert await ask(fleet, A) == Told(cold[0], 160)
        await fleet.submit("poisoned", [*A[:64], BAD], 4)
        assert (await fleet.ended("poisoned"))[-1].chunk.finish == inference_pb2.ERROR
        assert await covered() == [10, 10], "nobody has deleted them yet"
        if not drained:
            await broker.call("HSET", broker.keys.worker("w0"), "incarnation", "someone else")

            async def ended() -> bool:
                return fleet.running.done()

            await until(ended, within_s=20)
    assert await covered() == [0, 10]
    await store.close()
