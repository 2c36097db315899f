"""How often a look at the prefix index asks the workers' sets: that is what it costs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvstore.block_hash import chain, root
from kvstore.prefix_index import PrefixIndex, short

from .conftest import LONG_TTL_MS, Stage

if TYPE_CHECKING:
    from kvstore.client import Broker

WORKERS = 20


async def test_few_looks_tell_how_much_each_holds(stage: Stage, broker: Broker) -> None:
    """One where all hold as much as most do; where each holds another part, as many as a bisection takes, and two that
    guess."""
    index, whole, dice = (
        PrefixIndex(broker, lease_ttl_ms=LONG_TTL_MS),
        chain(root("f", 1), range(512), 1),
        random.Random(3),
    )
    workers = [await stage.worker(f"w{number}") for number in range(WORKERS)]

    async def looks(depths: list[int]) -> int:
        for worker, depth in zip(workers, depths, strict=True):
            await index.replace(worker.id, worker.incarnation, tuple(map(short, whole[:depth])))
        before = await asked(broker)
        found = await index.match(workers, {"f": whole})
        assert [found[worker.id].blocks for worker in workers] == depths
        return await asked(broker) - before

    assert await looks([0] * WORKERS) == WORKERS
    assert await looks([512] * WORKERS) == WORKERS
    # The first one is searched for.
    assert await looks([128] * WORKERS) <= WORKERS + 9
    # One in five has more: it is searched for once, then guessed, and confuses nobody.
    assert await looks([128, 128, 128, 128, 300] * 4) <= WORKERS + 9 + (1 + 9) + 3
    assert await looks([dice.randrange(1, 513) for _ in workers]) <= WORKERS * (2 + 9)


async def asked(broker: Broker) -> int:
    """How often anybody was asked about members of a set."""
    stats = await broker.call("INFO", "commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("smismember", "sismember"))
