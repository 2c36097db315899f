"""What a tenant's requests leave behind, in the pool, in the index and in a page store, is found by its own alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.prefix_index import PrefixIndex
from tests.integration.worker.one_worker import running_worker
from tests.integration.worker.paging import POOL, A, B, C, ask, event, told_at_least
from tests.support.waiting import until
from worker.config import PagesConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Broker

BLOCK = 16
WHOLE = len(A) // BLOCK * BLOCK


async def test_a_pool_keeps_tenants_apart(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    async with running_worker(broker, model_dir, tmp_path) as fleet:
        cold = await ask(fleet, A, tenant="acme")
        assert cold.cached == 0
        for tenant, salt, cached in (
            ("acme", "", WHOLE),
            ("other", "", 0),
            ("", "", 0),
            ("", "acme", 0),
            ("acme", "acme", 0),
            ("other", "", WHOLE),
            ("acme", "", WHOLE),
        ):
            told = await ask(fleet, A, tenant=tenant, salt=salt)
            assert (told.tokens, told.cached) == (cold.tokens, cached), (tenant, salt)
        # The index that gateways and thieves go by has one part for each of the five.
        index, info = PrefixIndex(broker), fleet.worker.info

        async def told_apart() -> bool:
            return len(await index.members(info.id, info.incarnation)) == 5 * (WHOLE // BLOCK)

        await until(told_apart, within_s=5)


@pytest.mark.usefixtures("patient")
async def test_a_page_store_keeps_tenants_apart(broker: Broker, model_dir: Path, tmp_path: Path) -> None:
    pages = PagesConfig(folder=str(tmp_path / "pages"))
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=pages) as fleet:
        cold = await ask(fleet, A, tenant="acme")
        for prompt in (B, C):  # pushes A out
            await ask(fleet, prompt, tenant="acme")
        await told_at_least(fleet, "stored", WHOLE // BLOCK)
        assert await ask(fleet, A, tenant="other") == (cold.tokens, 0)
        assert event(fleet, "fetched") == 0
        for prompt in (B, C):
            await ask(fleet, prompt, tenant="other")
        assert await ask(fleet, A, tenant="acme") == cold._replace(cached=WHOLE)
        assert event(fleet, "fetched") > 0
