"""What a gateway's decisions learn from each other: how often a prompt's beginning is asked for."""

from __future__ import annotations

import random
from dataclasses import replace
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
    """One worker holds so many blocks of whatever prompt, the others none."""

    def __init__(self, blocks: int, *workers: WorkerInfo) -> None:
        self.blocks = blocks
        self.workers = workers or (HOLDER, IDLE)
        self.holder = self.workers[0]
        world: Any = self
        self.placing = Placing(world, world, max_queue=9, rng=random.Random(0), clock=lambda: 5.0)

    async def match(self, workers: Sequence[WorkerInfo], _: Mapping[str, object]) -> dict[str, Seen]:
        return {each.id: Seen(self.blocks if each is self.holder else 0, Load()) for each in workers}

    async def place(self, need: Need) -> float:
        """How often its beginning was found to be asked for."""
        booking = await self.placing.place(need, self.workers)
        assert isinstance(booking, Booking)
        self.placing.settle(booking, applied=True, stands=False)
        return booking.decision.work.repeats


def need(own: int, beginning: int = 0, model: str = "m", **fields: Any) -> Need:
    """64 tokens that it shares with all of the same beginning, and 16 of its own."""
    tokens = [*range(beginning, beginning + 64), *range(own, own + 16)]
    stopping = inference_pb2.Stopping(max_tokens=8)
    job = job_pb2.Job(request_id="r", model=model, prompt_token_ids=tokens, stopping=stopping, **fields)
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


async def test_what_other_models_are_asked_is_another_matter() -> None:
    fleet = Fleet(blocks=4)
    for number in range(9):
        await fleet.place(need(1000, beginning=100 * number, model="busy"))
    assert [await fleet.place(need(own)) for own in (1000, 2000)] == [0.0, pytest.approx(0.1)]


async def test_a_prompt_is_the_same_whichever_kind_of_worker_has_it() -> None:
    kinds = [replace(HOLDER, id=name, incarnation=f"{name}-1", fingerprint=name) for name in "kjl"]
    fleet = Fleet(4, *kinds)
    found = []
    for number, holder in enumerate((kinds[0], kinds[1], kinds[2], kinds[0])):
        fleet.holder = holder
        found.append(await fleet.place(need(1000 * number + 1000)))
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.3])


async def test_what_a_worker_has_that_takes_no_jobs_is_nobody_s() -> None:
    fleet = Fleet(4, replace(HOLDER, state="draining"), IDLE)
    assert [await fleet.place(need(own)) for own in (1000, 2000, 3000)] == [0.0] * 3
    fleet, found = Fleet(blocks=4), []
    for own in (1000, 2000, 3000):
        declined = need(own)
        declined.refused["h-1"] = "its queue is full"
        found.append(await fleet.place(declined))
    assert found == [0.0] * 3
