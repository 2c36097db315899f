"""Short ways to drive a scheduler in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.block_hash import root
from worker.params import SamplingParams, StopParams
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Request, Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker.scheduling.plan import Schedule

BS = 4


def make(
    num_blocks: int = 16,
    *,
    max_running: int = 8,
    token_budget: int = 32,
    context_length: int = 1000,
    chunk_tokens: int | None = None,
    logit_rows: int = 128,
    cache_blocks: int | None = None,
    block_size: int = BS,
    block_run: int = 1,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size, cache_blocks, block_run),
        max_running=max_running,
        token_budget=token_budget,
        context_length=context_length,
        chunk_tokens=chunk_tokens,
        logit_rows=logit_rows,
    )


def sequence(
    name: str,
    prompt: Iterable[int],
    *,
    salt: str = "",
    priority: int = 0,
    n: int = 1,
    scored: bool = False,
    block_size: int = BS,
    tenant: str = "",
    max_tokens: int = 100,
) -> Sequence:
    request = Request(
        name,
        tuple(prompt),
        SamplingParams(),
        StopParams(max_tokens=max_tokens),
        salt=salt,
        n=n,
        priority=priority,
        prompt_logprobs=0 if scored else None,
        tenant=tenant,
    )
    return Sequence(request, root=root("model", block_size, salt), block_size=block_size)


def add(
    scheduler: Scheduler,
    name: str,
    length: int,
    *,
    first: int | None = None,
    salt: str = "",
    priority: int = 0,
    n: int = 1,
    scored: bool = False,
) -> Sequence:
    """``length`` prompt tokens counting up from ``first``; by default no two names share a prefix."""
    start = sum(map(ord, name)) * 1000 if first is None else first
    return add_prompt(scheduler, name, range(start, start + length), salt=salt, priority=priority, n=n, scored=scored)


def add_prompt(
    scheduler: Scheduler,
    name: str,
    prompt: Iterable[int],
    *,
    salt: str = "",
    priority: int = 0,
    n: int = 1,
    scored: bool = False,
) -> Sequence:
    block_size = scheduler.pool.block_size
    made = sequence(name, prompt, salt=salt, priority=priority, n=n, scored=scored, block_size=block_size)
    scheduler.add(made)
    return made


def plan(schedule: Schedule) -> dict[str, int]:
    """Tokens by name; of a choice but the first, the name is followed by its number."""
    return {named(entry.sequence): entry.num_tokens for entry in schedule.entries}


def finish(scheduler: Scheduler, schedule: Schedule) -> None:
    """A step has run; what caught up gets one more token."""
    for entry in schedule.entries:
        entry.sequence.scored += entry.sequence.to_score(entry.num_tokens)
        scheduler.complete(entry)
        if entry.sequence.num_uncomputed == 0:
            entry.sequence.tokens.append(7)
    scheduler.check_integrity()


def step(scheduler: Scheduler) -> dict[str, int]:
    """One whole step."""
    schedule = scheduler.schedule()
    finish(scheduler, schedule)
    return plan(schedule)


def named(sequence: Sequence) -> str:
    return sequence.request.request_id + (str(sequence.choice) if sequence.choice else "")


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [named(each) for each in sequences]
