"""Hashes of a prompt, as workers of each kind know them, and the look at what the fleet holds of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from gateway.prefixes import ALONE_S, AT_A_TIME, HASHED_AT_ONCE, MOST_TOKENS, Index, Looks, PromptHashes
from kvstore.block_hash import chain, root
from kvstore.errors import BrokerUnreachable
from kvstore.prefix_index import Seen
from kvstore.registry import Load, WorkerInfo
from octavo.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.block_hash import BlockHash


def worker(fingerprint: str = "f", block_size: int = 16) -> WorkerInfo:
    return WorkerInfo("w", "i", "m", fingerprint, block_size=block_size)


@pytest.mark.parametrize("length", [1, 15, 16, 50, HASHED_AT_ONCE // 4, HASHED_AT_ONCE + 17])
async def test_hashes_are_those_of_the_worker(length: int) -> None:
    hashes = PromptHashes(job_pb2.Job(prompt_token_ids=range(length), cache_salt="ours"))
    kinds = [worker(), worker("g"), worker(block_size=8)]
    await hashes.prepare(kinds)
    for each in kinds:
        start = root(each.fingerprint, each.block_size, "ours")
        assert hashes.of(each) == chain(start, range(length), each.block_size)


async def test_hashes_are_the_tenants_own() -> None:
    hashes = PromptHashes(job_pb2.Job(request_id="acme/r", prompt_token_ids=range(50), cache_salt="ours"))
    await hashes.prepare([worker()])
    assert hashes.of(worker()) == chain(root("f", 16, "ours", tenant="acme"), range(50), 16)


async def test_what_is_there_is_not_computed_again() -> None:
    hashes = PromptHashes(job_pb2.Job(prompt_token_ids=range(50)))
    await hashes.prepare([worker()])
    first = hashes.of(worker())
    await hashes.prepare([worker(), worker("g")])
    assert hashes.of(worker()) is first
    assert len(hashes.of(worker("g"))) == 3


async def test_of_a_huge_prompt_the_beginning_is_looked_for() -> None:
    hashes = PromptHashes(job_pb2.Job(prompt_token_ids=[7] * (MOST_TOKENS + 64)))
    await hashes.prepare([worker(block_size=64)])
    assert len(hashes.of(worker(block_size=64))) == MOST_TOKENS // 64


@pytest.mark.parametrize(("kinds", "beside"), [(1, False), (4, False), (5, True)])
async def test_what_takes_long_is_hashed_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, kinds: int, beside: bool
) -> None:
    """For each kind of worker anew."""
    threads = 0

    async def to_thread(do: Any, *args: Any) -> Any:
        nonlocal threads
        threads += 1
        return do(*args)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    hashes = PromptHashes(job_pb2.Job(prompt_token_ids=[7] * (HASHED_AT_ONCE // 4)))
    await hashes.prepare([worker(f"f{index}") for index in range(kinds)])
    assert threads == beside


class World:
    """An index and a registry: a look at the index takes 5 ms, and only one is made at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.under_way = self.most = self.asked = 0
        self.trouble = ""

    async def match(self, workers: Sequence[WorkerInfo], _: Mapping[str, Sequence[BlockHash]]) -> dict[str, Seen]:
        self.asked += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.trouble == "slow":
                await asyncio.Event().wait()
            if self.trouble == "error":
                raise BrokerUnreachable("gone")
            async with self.lock:
                await asyncio.sleep(0.005)
        finally:
            self.under_way -= 1
        return {each.id: Seen(2, Load(1, 2, 3, 4)) for each in workers}

    async def loads(self, workers: Sequence[WorkerInfo]) -> dict[str, Load]:
        return {each.id: Load(1, 2, 3, 4) for each in workers}


async def hashed(blocks: int = 3) -> PromptHashes:
    hashes = PromptHashes(job_pb2.Job(prompt_token_ids=range(16 * blocks)))
    await hashes.prepare([worker()])
    return hashes


def nothing() -> dict[str, int]:
    """Is promised."""
    return {"w": 0}


async def test_500_calls_at_once_all_see_what_the_fleet_holds() -> None:
    """Together they take twice as long as the index may: it is their crowd that does, not the index."""
    world, hashes = World(), await hashed()
    looks: Any = Looks
    looks = looks(world, world, limit_s=1.0)
    views = await asyncio.gather(*(looks.look([worker()], hashes, nothing) for _ in range(500)))
    assert {(view.index, view.held_blocks["w"]) for view in views} == {(Index.EXACT, 2)}
    assert world.most == AT_A_TIME


@pytest.mark.parametrize("trouble", ["slow", "error"])
async def test_an_index_in_trouble_is_left_alone_for_a_while(trouble: str) -> None:
    now, world, hashes = 100.0, World(), await hashed()
    looks: Any = Looks
    looks = looks(world, world, limit_s=0.05, clock=lambda: now)
    world.trouble = trouble
    for _ in range(3):
        view = await looks.look([worker()], hashes, nothing)
        assert (view.index, view.held_blocks, view.loads) == (Index.FALLBACK, {"w": 0}, {"w": Load(1, 2, 3, 4)})
    assert world.asked == 1
    world.trouble = ""
    now += ALONE_S
    assert (await looks.look([worker()], hashes, nothing)).index is Index.EXACT


async def test_what_is_promised_meanwhile_is_not_counted_among_the_pages_as_well() -> None:
    class Pages:
        async def look(self, _: object, __: object, held: Mapping[str, int]) -> dict[str, int]:
            assert held == {"w": 2}
            promised["w"] = promise
            return {"w": 5}

    world, hashes = World(), await hashed(10)
    looks: Any = Looks
    looks = looks(world, world, Pages())
    for promise, stored in ((0, 5), (4, 3), (9, 0)):
        promised = {"w": 0}
        view = await looks.look([worker()], hashes, lambda: promised)  # noqa: B023 (called before the next round)
        assert (view.held_blocks["w"], view.stored_blocks["w"]) == (max(2, promise), stored)
