"""2,000 streams, each left by its client after a token or two: nothing of them stays, neither blocks nor memory."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

import psutil
import pytest

from octavo.v1.inference_pb2 import GenerateRequest, Sampling, Stopping, TokenIds
from ops.client import Client
from tests.e2e.harness import Up, eventually
from tests.support.tiny_model import save_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(400)

WARM_UP, CYCLES, AT_ONCE = 500, 2000, 16
GROWTH_BYTES = 4 << 20
"""Of one process over all cycles: 2 KB per request would be seen. What a process keeps for itself is far less."""


@pytest.fixture
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One worker on a tiny model, whose steps take a millisecond or two."""
    model = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    started = Up.start("--workers", "1", "--model", str(model), "--kv-tokens", "4096", "--grace", "5")
    try:
        yield started.until_ready()
    finally:
        started.stop()


async def leave_early(client: Client, numbers: random.Random) -> None:
    """Some leave at once, some after a token or two; some prompts are shared, some are long."""
    prompt = [2 + token % 200 for token in range(numbers.choice((8, 8, 40, 120)))]
    prompt += [numbers.randrange(2, 300) for _ in range(numbers.randrange(1, 30))]
    request = GenerateRequest(
        token_ids=TokenIds(ids=prompt),
        sampling=Sampling(temperature=numbers.choice((0.0, 1.0))),
        stopping=Stopping(max_tokens=200, ignore_eos=True, stop=numbers.choice(([], ["never said"]))),
        n=numbers.choice((1, 1, 1, 3)),
    )
    leave_after = numbers.choice((0, 1, 2))
    if leave_after == 0:
        call = asyncio.create_task(client.generate(request))
        await asyncio.sleep(numbers.random() * 0.01)  # anywhere between the call and its first token
        call.cancel()
        await asyncio.wait([call])
        return
    async for _ in client.responses(request):
        leave_after -= 1
        if not leave_after:
            return


async def cycles(client: Client, count: int, seed: int) -> None:
    numbers = random.Random(seed)
    left = iter(range(count))

    async def one_after_another() -> None:
        for _ in left:
            await leave_early(client, numbers)

    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))


def memory(up: Up) -> dict[int, int]:
    """Bytes that belong to each process alone, swapped ones too. Not the broker's: it keeps what jobs left for a while,
    for callers that come back."""
    found = {}
    for pid in up.pids:
        process = psutil.Process(pid)
        if not any(broker in process.name() for broker in ("valkey", "redis")):
            full = process.memory_full_info()
            found[pid] = full.uss + full.swap
    return found


async def test_cancelled_streams_leave_nothing(up: Up) -> None:
    async with Client(up.target) as client:

        async def at_rest() -> bool:
            (worker,), (queue,) = await client.workers(), await client.queues()
            idle = not (worker.running or worker.waiting or worker.blocks_used)
            return idle and (queue.undelivered, queue.pending) == (0, 0)

        await cycles(client, WARM_UP, seed=1)
        await eventually(at_rest, 20)
        before = memory(up)
        await cycles(client, CYCLES, seed=2)
        await eventually(at_rest, 20)
        (worker,) = await client.workers()
        assert worker.blocks_free + worker.blocks_cached == worker.kv_tokens // worker.block_size
        growth = {pid: size - before[pid] for pid, size in memory(up).items()}
        logger.info("growth in KiB: %s", {pid: size >> 10 for pid, size in growth.items()})
        assert all(size < GROWTH_BYTES for size in growth.values()), growth
        request = GenerateRequest(text="a book", stopping=Stopping(max_tokens=5, ignore_eos=True))
        assert (await client.generate(request)).finish == "LENGTH"
