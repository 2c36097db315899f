"""What all prompts begin with never leaves a worker's pool; others find it in the store all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.page import names_of
from tests.integration.worker.one_worker import running_worker
from tests.integration.worker.paging import POOL, Told, ask, event
from tests.support.waiting import until
from worker.config import PagesConfig
from worker.pages import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker

pytestmark = pytest.mark.usefixtures("patient")

HEAD = tuple(2 + 7 * index % 200 for index in range(80))
PROMPTS = [(*HEAD, *(2 + (11 * index + shift) % 200 for index in range(81))) for shift in range(4)]
"""Of ten blocks and one token; two of them, with one head, are all that the pool has room for."""


@pytest.mark.parametrize("where", ["redis", "folder"])
async def test_a_hot_head_is_stored_with_its_tails(
    broker: Broker, model_dir: Path, tmp_path: Path, broker_url: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.pages.WARM_SHARE", 0.0)
    config = PagesConfig(redis=broker_url) if where == "redis" else PagesConfig(folder=str(tmp_path / "pages"))
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        cold = [(await ask(fleet, prompt)).tokens for prompt in PROMPTS]
    store = open_store(config, broker.keys.namespace)
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:
        form, engine = fleet.worker.form, fleet.worker.engine
        hashes = [name.hash for name in names_of(engine.root_of(""), PROMPTS[0], form.block_size)]
        assert [(await ask(fleet, prompt)).tokens for prompt in PROMPTS] == cold

        async def complete() -> bool:
            return await store.covered(form.fingerprint, hashes) == 10

        await until(complete, within_s=20)
        assert event(fleet, "heads") >= 5
        assert engine.paging is not None
        assert all(engine.paging.offers(hash_) for hash_ in hashes[:5]), "it never left the pool"
        # While that worker goes on, another one finds all of it.
        async with running_worker(broker, model_dir, tmp_path, name="w1", pages=config) as other:
            assert await ask(other, PROMPTS[0]) == Told(cold[0], 160)
    await store.close()
