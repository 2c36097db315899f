"""How much of the allocated K/V memory holds nothing: requests of all lengths through a real scheduler and pool."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.standin import Clock, StandIn, made_up_table, peaked_logits
from worker.engine import Engine
from worker.params import SamplingParams, StopParams
from worker.sampling.sampler import TorchSampler
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 300
"""Small: what is drawn doesn't matter here."""
PREFIXES = (48, 96, 200)
"""Lengths of the beginnings that half of the prompts share."""
ARRIVALS_PER_STEP = 0.12
"""On average. With the lengths below, about as much as 32 sequences at once get done."""


@dataclass(frozen=True, slots=True)
class Waste:
    """What a run found."""

    requests: int
    choices: int
    steps: int
    sequences: float
    """Running at once, on average."""
    slots: float
    """Token positions in allocated blocks, on average."""
    unused: float
    """The share of them that held no key and value at the end of a step, on average over all steps."""
    cached: float
    """The share of the prompts' tokens that was found in the cache."""


def measure_waste(
    *, requests: int, seed: int, longest: int = 1500, block_size: int = 16, max_running: int = 32
) -> Waste:
    """Run a mixed load to its end: Poisson arrivals, log-normal lengths, shared prefixes, several choices.

    No prompt, its shared beginning aside, and no answer has more than ``longest`` tokens.
    """
    scheduler = Scheduler(
        BlockPool(32768 // block_size, block_size),
        max_running=max_running,
        token_budget=512,
        chunk_tokens=256,
        context_length=8192,
    )
    engine = _engine(scheduler, seed)
    coming = deque(_requests(requests, seed, longest))
    choices = sum(request.n for request in coming)
    arrivals = random.Random(f"{seed}/arrivals")
    step, due = 0, 0.0
    found: list[tuple[float, int, int]] = []
    while coming or engine.has_work:
        while coming and due <= step:
            engine.add(coming.popleft())
            due += arrivals.expovariate(ARRIVALS_PER_STEP)
        step += 1
        if not engine.has_work:
            continue
        engine.step()
        slots, used = occupancy(scheduler)
        if slots:
            found.append((1 - used / slots, slots, len(scheduler.running)))
    unused, allocated, sequences = (sum(column) / len(found) for column in zip(*found, strict=True))
    return Waste(
        requests=requests,
        choices=choices,
        steps=len(found),
        sequences=sequences,
        slots=allocated,
        unused=unused,
        cached=scheduler.prefix_hit / max(1, scheduler.prefix_queried),
    )


def occupancy(scheduler: Scheduler) -> tuple[int, int]:
    """Token positions in the blocks that somebody uses, and how many of these hold a key and value.

    A block that several share counts once, with the longest part that any of them has filled.
    """
    size = scheduler.pool.block_size
    filled: dict[int, int] = {}
    for sequence in scheduler.running:
        for index, block in enumerate(sequence.block_table):
            own = min(max(sequence.num_computed - index * size, 0), size)
            filled[block] = max(own, filled.get(block, 0))
    return scheduler.pool.used_count * size, sum(filled.values())


def _engine(scheduler: Scheduler, seed: int) -> Engine:
    """One without a model, over this scheduler's blocks."""
    pool, bank = scheduler.pool, peaked_logits(16, VOCABULARY, seed)
    most_rows = scheduler.max_running
    return Engine(
        StandIn(bank, num_blocks=pool.total, block_size=pool.block_size, most_rows=most_rows, clock=Clock()),
        scheduler,
        sampler=TorchSampler(),
        text_stream=made_up_table(VOCABULARY).stream,
        eos_token_ids=(),
        fingerprint="waste",
    )


def _requests(count: int, seed: int, longest: int) -> Iterator[Request]:
    """Prompts of 130 tokens in the middle and answers of 180, both with a long tail; one of ten has 2 to 4 choices."""
    numbers = random.Random(f"{seed}/requests")
    prefixes = [_tokens(numbers, length) for length in PREFIXES]
    for index in range(count):
        length = min(int(numbers.lognormvariate(4.87, 1.0)) + 1, longest)
        prefix = numbers.choice(prefixes) if numbers.random() < 0.5 else ()
        yield Request(
            request_id=str(index),
            prompt=(*prefix, *_tokens(numbers, length)),
            sampling=SamplingParams(seed=numbers.getrandbits(64)),
            stopping=StopParams(max_tokens=min(int(numbers.lognormvariate(5.2, 0.8)) + 1, longest)),
            n=numbers.randint(2, 4) if numbers.random() < 0.1 else 1,
        )


def _tokens(numbers: random.Random, count: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(VOCABULARY) for _ in range(count))
