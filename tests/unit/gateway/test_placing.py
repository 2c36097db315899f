"""What a gateway's decisions learn from each other: how often a prompt's beginning is asked for."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from gateway.placing import Booking, Need, Placing
from gateway.prefixes import PromptHashes
from kvstore.prefix_index import Seen
from kvstore.registry import Load, WorkerInfo
from octavo.v1 import inference_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOLDER, IDLE = (
    WorkerInfo(name, f"{name}-1", "m", "f", block_size=16, prefill_tok_s=1000.0, step_ms=10.0) for name in "hi"
)


class Fleet:
    """One worker holds so many blocks of whatever prompt, the other none."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        world: Any = self
        self.placing = Placing(world, world, max_queue=9, rng=random.Random(0), clock=lambda: 5.0)

    async def match(self, workers: Sequence[WorkerInfo], _: Mapping[str, object]) -> dict[str, Seen]:
        return {each.id: Seen(self.blocks if each is HOLDER else 0, Load()) for each in workers}

    async def place(self, need: Need) -> float:
        """How often its beginning was found to be asked for."""
        booking = await self.placing.place(need, [HOLDER, IDLE])
        assert isinstance(booking, Booking)
        self.placing.settle(booking, applied=True, stands=False)
        return booking.decision.work.repeats


def need(own: int, beginning: int = 0, **fields: Any) -> Need:
    """64 tokens that it shares with all of the same beginning, and 16 of its own."""
    tokens = [*range(beginning, beginning + 64), *range(own, own + 16)]
    stopping = inference_pb2.Stopping(max_tokens=8)
    job = job_pb2.Job(request_id="r", model="m", prompt_token_ids=tokens, stopping=stopping, **fields)
    return Need(job, PromptHashes(job))


async def test_what_begins_alike_as_far_as_anybody_has_it_is_counted() -> None:
    fleet = Fleet(blocks=4)
    assert await fleet.place(need(1000)) == 0.0
    assert await fleet.place(need(2000)) == pytest.approx(0.1)
    assert await fleet.place(need(3000, beginning=7)) == 0.0
    assert await fleet.place(need(4000)) == pytest.approx(0.2)


async def test_a_job_counts_once_however_many_workers_decline_it() -> None:
    fleet = Fleet(blocks=4)
    first = need(1000)
    assert [await fleet.place(first) for _ in range(3)] == [0.0] * 3
    assert await fleet.place(need(2000)) == pytest.approx(0.1)


async def test_what_nobody_has_or_must_be_computed_repeats_nothing() -> None:
    fleet = Fleet(blocks=0)
    assert [await fleet.place(need(own)) for own in (1000, 2000, 3000)] == [0.0] * 3
    fleet = Fleet(blocks=4)
    assert [await fleet.place(need(own, prompt_logprobs=1)) for own in (1000, 2000)] == [0.0] * 2
