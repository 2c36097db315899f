"""What the prefix index shows of a worker, and what its pool offers."""

from __future__ import annotations

from kvstore.block_hash import chain, root
from kvstore.prefix_index import PrefixIndex, short
from kvstore.registry import Registry
from tests.integration.worker.one_worker import Fleet, joined
from tests.support.waiting import until

REPAIR_S = 2.0
"""A worker that is free to do so has repaired its part of the index by then."""
PROMPT = list(range(5, 5 + 50))


def offered(fleet: Fleet) -> set[bytes]:
    """By the pool's own books."""
    return {short(hash_) for hash_ in fleet.worker.engine._scheduler.pool._by_hash}


async def shown(fleet: Fleet) -> set[bytes]:
    """By the index."""
    info = fleet.worker.info
    return await PrefixIndex(fleet.broker).members(info.id, info.incarnation)


async def agree(fleet: Fleet, within_s: float = 10.0) -> set[bytes]:
    """Returns once the worker is idle and the index shows just what its pool offers, and what that is."""
    await fleet.idle()

    async def same() -> bool:
        return await shown(fleet) == offered(fleet)

    await until(same, within_s=within_s)
    return offered(fleet)


async def answer(fleet: Fleet, name: str, prompt: list[int], tokens: int = 6) -> list[int]:
    await fleet.submit(name, prompt, tokens, seed=3)
    return joined(await fleet.ended(name))


async def matched(fleet: Fleet, prompt: list[int]) -> int:
    """Blocks of a prompt that the index shows for the worker that lives under its name now."""
    (info,) = await Registry(fleet.broker).workers()
    hashes = chain(root(info.fingerprint, info.block_size), prompt, info.block_size)
    return (await PrefixIndex(fleet.broker).match([info], {info.fingerprint: hashes}))[info.id].blocks


async def said(fleet: Fleet) -> str:
    """What the lease tells of the index."""
    (info,) = await Registry(fleet.broker).workers()
    return info.index
