"""`octavo bench pages`: the first token after a prefix that comes back from a store, beside one that is computed.

A fleet with one worker whose pool has room for little more than one prompt. Two kinds of prompts take turns in it: new
ones, and one that was there before, which each new one pushes out into the store. So what is measured is the same
length on the same worker, moments apart: once computed, once fetched.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.machine import describe_machine
from bench.runner import TIMEOUT_S
from bench.scrape import scrape
from bench.stats import percentile
from bench.workload import Lengths, Workload
from ops.client import Client, plain
from ops.console import Loading
from ops.fleet import Fleet
from worker.__main__ import default_cache
from worker.model.simulated import CONTEXT_LENGTH, is_simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.v1 import inference_pb2
    from ops.config import FleetConfig

STORES: Final = ("redis", "dir")
ANSWER_TOKENS: Final = 4
SETTLE_S: Final = 30.0
"""How long pages may take to be stored."""
COLUMNS: Final = ("store", "prompt", "computed p50", "fetched p50", "ratio", "found", "fetched/s", "pays from", "equal")


@dataclass(frozen=True, slots=True)
class PagesBench:
    """One run."""

    lengths: tuple[int, ...] = (128, 512, 1500)
    """Of prompts, in tokens."""
    turns: int = 10
    """Prompts of either kind."""
    stores: tuple[str, ...] = STORES
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one length in one store. Times are those of the client, in seconds."""

    store: str
    prompt_tokens: int
    computed_s: list[float]
    fetched_s: list[float]
    """Of the prompts that came back; where nothing was fetched, their blocks were in the pool or were computed."""
    cached_tokens: list[int]
    """Of the prompts that came back."""
    fetch_tok_s: float
    break_even_tokens: float
    """As the worker itself has measured them; 0: it has fetched nothing."""
    equal: bool
    """Whether all answers to the prompt that came back are those of its first, cold run."""

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        computed, fetched = percentile(self.computed_s, 50), percentile(self.fetched_s, 50)
        known = self.fetch_tok_s > 0
        pays = known and self.break_even_tokens != float("inf")
        return {
            "store": self.store,
            "prompt_tokens": self.prompt_tokens,
            "computed_first_token_s": {"p50": computed, "all": self.computed_s},
            "fetched_first_token_s": {"p50": fetched, "all": self.fetched_s},
            "ratio": fetched / computed if known else None,
            "cached_tokens": percentile(self.cached_tokens, 50),
            "fetch_tokens_per_s": self.fetch_tok_s if known else None,
            "break_even_tokens": self.break_even_tokens if pays else None,
            "equal": self.equal,
        }


async def run_pages(config: PagesBench, settings: FleetConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures, and returns what is printed as JSON.

    Raises:
        grpc.aio.AioRpcError: a request failed.
        ChildFailed: a fleet did not start.
        BrokenStream: an answer was none.
        TimeoutError: pages were not stored in time.
    """
    machine, model, rows = describe_machine(), None, []
    for store in config.stores:
        for length in config.lengths:
            note(f"{store}, prompts of {length} tokens")
            seen, model = await _measure(config, settings, store, length, note)
            rows.append(seen.figures())
    return {"machine": machine, "model": plain(model) if model is not None else {}, "lengths": rows}


def small_pool(length: int, block_size: int) -> int:
    """Tokens of a pool that has room for a prompt, its answer and a block."""
    return (-(-(length + ANSWER_TOKENS) // block_size) + 1) * block_size


def context_of(settings: FleetConfig, note: Callable[[str], None]) -> int:
    """Tokens that a prompt and its answer may have together, without a fleet.

    Raises:
        ModelError: the model is not there, or of no kind that can be loaded here.
    """
    if is_simulated(settings.model):
        return CONTEXT_LENGTH
    from worker.model.loader import resolve

    cache = Path(os.environ.get("OCTAVO_CACHE") or default_cache())
    found = resolve(settings.model, cache_dir=cache, dtype=settings.dtype, device=settings.device, progress=note)
    return found.context_length


async def _measure(
    config: PagesBench, settings: FleetConfig, store: str, length: int, note: Callable[[str], None]
) -> tuple[Seen, inference_pb2.Model]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-pages-"))
        place, server = ("redis", settings.pages_redis) if store == "redis" else (f"dir:{folder}", "")
        pool = small_pool(length, settings.block_size or 16)
        loading = Loading()
        fleet = await stack.enter_async_context(
            Fleet(replace(settings, pages=place, pages_redis=server, kv_tokens=pool, workers=1), loading.sink, note)
        )
        loading.over = True
        client = await stack.enter_async_context(Client(fleet.targets[0]))
        worker = str(fleet.workers[0].child.ready["metrics"])
        model = await client.model()
        requests = _requests(config, length, model.vocab_size)
        back, new = requests[0], requests[1:]
        cold = await client.generate(back, timeout=TIMEOUT_S)
        computed, fetched, cached, equal = [], [], [], True
        for turn, request in enumerate(new):
            answer = await client.generate(request, timeout=TIMEOUT_S)
            await _settled(worker)
            again = await client.generate(back, timeout=TIMEOUT_S)
            await _settled(worker)
            equal = equal and again.token_ids == cold.token_ids
            if turn:  # the first turn is the warm-up
                computed.append(answer.first_token_s or 0.0)
                fetched.append(again.first_token_s or 0.0)
                cached.append(again.usage.cached_tokens if again.usage else 0)
        told = await asyncio.to_thread(scrape, worker)
        speed = told["octavo_pages_fetch_tokens_per_second"]
        least = told["octavo_pages_break_even_tokens"]
        return Seen(store, length, computed, fetched, cached, speed, least, equal), model


def _requests(config: PagesBench, length: int, vocab_size: int) -> Sequence[inference_pb2.GenerateRequest]:
    """Greedy requests of random tokens: the one that comes back, one for the warm-up, and the others."""
    workload = Workload(Lengths(length, length), Lengths(ANSWER_TOKENS, ANSWER_TOKENS), kind="random", seed=config.seed)
    return workload.requests(config.turns + 2, vocab_size, stream=length)


async def _settled(worker: str) -> None:
    """Returns once all that was evicted is stored: writing takes the worker's time, and is not what is measured."""
    until = time.monotonic() + SETTLE_S
    while (await asyncio.to_thread(scrape, worker))["octavo_pages_buffer_bytes"]:
        if time.monotonic() > until:
            raise TimeoutError("pages were not stored in time")
        await asyncio.sleep(0.05)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    least, speed, ratio = row["break_even_tokens"], row["fetch_tokens_per_s"], row["ratio"]
    return (
        row["store"],
        str(row["prompt_tokens"]),
        f"{row['computed_first_token_s']['p50'] * 1000:.0f} ms",
        "-" if speed is None else f"{row['fetched_first_token_s']['p50'] * 1000:.0f} ms",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{row['cached_tokens']:.0f}",
        "-" if speed is None else f"{speed:.0f} tokens",
        "-" if speed is None else "never" if least is None else f"{least:.0f} tokens",
        "yes" if row["equal"] else "NO",
    )
