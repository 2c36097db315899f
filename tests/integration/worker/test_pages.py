"""Pages in a store, by a real worker with a real (tiny) model: answers are those of a cold run, to the bit, whatever
becomes of the store; when all goes well, there is less to compute."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import BlockHash
from kvstore.page import PageFormat, names_of
from kvstore.page_store import PageRef, PageStore, StoredPage
from tests.integration.worker.one_worker import running_worker
from tests.integration.worker.paging import POOL, A, B, C, Told, ask, count, event, told_at_least
from tests.support.waiting import until
from worker.config import PagesConfig
from worker.pages import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvstore.client import Broker

    Damage = Callable[[list[StoredPage], "Place"], list[StoredPage]]

pytestmark = pytest.mark.usefixtures("patient")

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(params=["redis", "folder"])
def config(request: pytest.FixtureRequest, tmp_path: Path, broker_url: str) -> PagesConfig:
    """Pages in the broker's own server, or in a folder."""
    if request.param == "redis":
        return PagesConfig(redis=broker_url)
    return PagesConfig(folder=str(tmp_path / "pages"))


class Place:
    """A store with all pages of prompts A, and the answers of a worker that never saw any."""

    def __init__(self, store: PageStore, form: PageFormat, root: BlockHash, cold: list[int]) -> None:
        self.store = store
        self.form = form
        self.names = names_of(root, A, form.block_size)
        self.cold = cold

    async def pages(self) -> list[StoredPage]:
        hashes = [name.hash for name in self.names]
        values = await self.store.fetch(self.form.fingerprint, hashes)
        return [
            StoredPage(PageRef(name.hash, name.position), value) for name, value in zip(self.names, values, strict=True)
        ]

    async def replace(self, pages: list[StoredPage]) -> None:
        await self.store.drop(self.form.fingerprint, [name.hash for name in self.names])
        await self.store.put(self.form.fingerprint, pages)


@pytest.fixture
async def place(broker: Broker, model_dir: Path, tmp_path: Path, config: PagesConfig) -> AsyncIterator[Place]:
    """Left by a worker that has ended."""
    async with running_worker(broker, model_dir, tmp_path, pages=config) as fleet:
        cold = (await ask(fleet, A)).tokens
        form, root = fleet.worker.form, fleet.worker.engine.root_of("")
    store = open_store(config, broker.keys.namespace)
    yield Place(store, form, root, cold)
    await store.close()


@pytest.mark.parametrize("dtype", DTYPES)
async def test_what_was_evicted_comes_back(
    broker: Broker, model_dir: Path, tmp_path: Path, config: PagesConfig, dtype: str
) -> None:
    prompts = (A, B, C)
    async with running_worker(broker, model_dir, tmp_path, dtype=dtype) as fleet:
        cold = [(await ask(fleet, prompt)).tokens for prompt in prompts]
    async with running_worker(broker, model_dir, tmp_path, dtype=dtype, kv_tokens=POOL, pages=config) as fleet:
        assert [await ask(fleet, prompt) for prompt in prompts] == [Told(tokens, 0) for tokens in cold]
        await told_at_least(fleet, "stored", 10)
        again = [await ask(fleet, prompt) for prompt in prompts * 2]
        assert [told.tokens for told in again] == cold * 2
        assert again[0].cached == 160
        assert sum(told.cached for told in again) >= 4 * 160
        assert event(fleet, "adopted") >= 40
        assert count(fleet, "errors_total", error="BrokerError") == 0
        await fleet.idle()
        # Tenants don't meet in the store either.
        assert (await ask(fleet, A, salt="other")) == Told(cold[0], 0)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_conversation_outlives_its_worker(
    broker: Broker, model_dir: Path, tmp_path: Path, config: PagesConfig, dtype: str
) -> None:
    async with running_worker(broker, model_dir, tmp_path, dtype=dtype, pages=config) as fleet:
        first = await ask(fleet, A, max_tokens=40)
    second = (*A, *first.tokens, 9, 8, 7)
    async with running_worker(broker, model_dir, tmp_path, dtype=dtype) as fleet:
        cold = await ask(fleet, second)
    for name in ("w1", "w2"):
        async with running_worker(broker, model_dir, tmp_path, dtype=dtype, name=name, pages=config) as fleet:
            assert await ask(fleet, second) == Told(cold.tokens, 192)


async def test_a_new_worker_fetches_the_hottest_before_anybody_asks(
    broker: Broker, model_dir: Path, tmp_path: Path, config: PagesConfig, place: Place
) -> None:
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=640, pages=config) as fleet:
        engine = fleet.worker.engine

        async def warm() -> bool:
            return engine.stats().blocks_cached == 10

        await until(warm, within_s=20)
        assert event(fleet, "adopted") == 10
        # They are at hand: nothing is looked for.
        looked = event(fleet, "fetched")
        assert await ask(fleet, A) == Told(place.cold, 160)
        assert event(fleet, "fetched") == looked


async def test_no_more_than_a_share_of_the_pool_is_filled_so(
    broker: Broker, model_dir: Path, tmp_path: Path, config: PagesConfig, place: Place
) -> None:
    async with running_worker(broker, model_dir, tmp_path, kv_tokens=POOL, pages=config) as fleet:
        await told_at_least(fleet, "adopted", 4)
        assert fleet.worker.engine.stats().blocks_cached == 4
        assert await ask(fleet, A) == Told(place.cold, 160)


def flipped(pages: list[StoredPage], _: Place) -> list[StoredPage]:
    value = bytearray(pages[4].value)
    value[-1] ^= 1
    return [*pages[:4], pages[4]._replace(value=bytes(value)), *pages[5:]]


def cut(pages: list[StoredPage], _: Place) -> list[StoredPage]:
    return [*pages[:4], pages[4]._replace(value=pages[4].value[:-7]), *pages[5:]]


def empty(pages: list[StoredPage], _: Place) -> list[StoredPage]:
    return [*pages[:4], pages[4]._replace(value=b""), *pages[5:]]


def another(pages: list[StoredPage], _: Place) -> list[StoredPage]:
    return [*pages[:4], pages[4]._replace(value=pages[5].value), *pages[5:]]


def of_form(pages: list[StoredPage], place: Place, **changes: str) -> list[StoredPage]:
    payload = place.form.decode(pages[4].value, place.names[4])
    value = replace(place.form, **changes).encode(place.names[4], payload)  # type: ignore[arg-type]
    return [*pages[:4], pages[4]._replace(value=value), *pages[5:]]


def other_model(pages: list[StoredPage], place: Place) -> list[StoredPage]:
    return of_form(pages, place, fingerprint="0" * 64)


def other_layout(pages: list[StoredPage], place: Place) -> list[StoredPage]:
    return of_form(pages, place, layout="octavo-kv/1 torch.float32")


def other_tenant(pages: list[StoredPage], place: Place) -> list[StoredPage]:
    payload = place.form.decode(pages[4].value, place.names[4])
    name = place.names[4]._replace(root=BlockHash(b"r" * 32))
    return [*pages[:4], pages[4]._replace(value=place.form.encode(name, payload)), *pages[5:]]


def half_gone(pages: list[StoredPage], _: Place) -> list[StoredPage]:
    return [*pages[:4], *pages[5:]]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flipped, "checksum"),
        (cut, "truncated"),
        (empty, "truncated"),
        (another, "place"),
        (other_model, "fingerprint"),
        (other_layout, "layout"),
        (other_tenant, "place"),
        (half_gone, "absent"),
    ],
)
async def test_a_page_that_is_not_what_it_should_be_is_a_miss(
    damage: Damage,
    reason: str,
    broker: Broker,
    model_dir: Path,
    tmp_path: Path,
    config: PagesConfig,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is counted and deleted. What is before it is used, what is behind it is not."""
    monkeypatch.setattr("worker.pages.WARM_SHARE", 0.0)
    await place.replace(damage(await place.pages(), place))
    async with running_worker(broker, model_dir, tmp_path, pages=config) as fleet:
        assert await ask(fleet, A) == Told(place.cold, 64)
        assert count(fleet, "misses_total", reason=reason) == 1
        assert event(fleet, "adopted") == 4
        assert await place.store.covered(place.form.fingerprint, [place.names[4].hash]) == 0
        await fleet.idle()
    # Its worker has computed it, and left it in its place.
    assert await place.store.covered(place.form.fingerprint, [name.hash for name in place.names]) == 10
    async with running_worker(broker, model_dir, tmp_path, name="w1", pages=config) as fleet:
        assert await ask(fleet, A) == Told(place.cold, 160)


async def test_a_new_worker_takes_no_damaged_page_either(
    broker: Broker, model_dir: Path, tmp_path: Path, config: PagesConfig, place: Place
) -> None:
    await place.replace(flipped(await place.pages(), place))
    async with running_worker(broker, model_dir, tmp_path, pages=config) as fleet:
        await told_at_least(fleet, "adopted", 4)
        assert await ask(fleet, A) == Told(place.cold, 64)


async def test_equal_prompts_at_once_are_fetched_once(
    broker: Broker, model_dir: Path, tmp_path: Path, config: PagesConfig, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.pages.WARM_SHARE", 0.0)
    async with running_worker(broker, model_dir, tmp_path, pages=config) as fleet:
        told = await asyncio.gather(*(ask(fleet, (*A, 3 + index)) for index in range(6)), ask(fleet, A))
        assert told[-1].tokens == place.cold
        assert [each.cached for each in told] == [160] * 7
        assert event(fleet, "fetched") == 10
