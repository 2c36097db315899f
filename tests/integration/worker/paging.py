"""What tests of pages share: prompts that are too much for a pool, and what a worker tells of them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from kvstore.tenants import job_name
from octavo.v1 import inference_pb2
from tests.integration.worker.one_worker import Fleet, joined
from tests.support.waiting import until

POOL = 256
"""Tokens: 16 blocks."""
A, B, C = (tuple(2 + (7 * index + shift) % 200 for index in range(161)) for shift in (0, 1, 2))
"""Prompts of ten blocks and one token: two of them are too much for the pool."""

numbers = itertools.count()


class Told(NamedTuple):
    """An answer."""

    tokens: list[int]
    cached: int


async def ask(fleet: Fleet, prompt: tuple[int, ...], *, salt: str = "", tenant: str = "", max_tokens: int = 6) -> Told:
    """A sampled answer, whose randomness is its own."""
    name = job_name(tenant, f"r{next(numbers)}")
    await fleet.submit(name, list(prompt), max_tokens, seed=5, edit=lambda job: setattr(job, "cache_salt", salt))
    log = await fleet.ended(name)
    assert log[-1].chunk.finish == inference_pb2.LENGTH, log[-1].chunk.error
    return Told(joined(log), log[0].route.cached_tokens)


def count(fleet: Fleet, name: str, **labels: str) -> float:
    return fleet.metrics.get_sample_value(f"octavo_pages_{name}", labels) or 0.0


def event(fleet: Fleet, name: str) -> float:
    return count(fleet, "total", event=name)


async def told_at_least(fleet: Fleet, name: str, least: int) -> None:
    async def enough() -> bool:
        return event(fleet, name) >= least

    await until(enough, within_s=20)
