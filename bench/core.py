"""`octavo bench core`: what a step costs beside the model.

The worker's real scheduler, pool, engine, sampler and detokenizers, over logits that were made beforehand. The time
that goes into handing these out doesn't count.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from bench.machine import describe_machine
from bench.standin import (
    BANK,
    Clock,
    StandIn,
    TimedSampler,
    made_up_table,
    peaked_logits,
    prepared_tokenizer,
    timed_streams,
)
from bench.stats import percentile
from bench.waste import Waste, measure_waste
from worker.detokenize import TokenBytes
from worker.engine import Engine
from worker.kernels.native.library import best
from worker.model.room import BOOKS, gib, machine
from worker.params import SamplingParams, StopParams
from worker.sampling.sampler import sampler_for
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from worker.kernels.native.library import Native

WARM_UP: Final = 10
"""Steps before the first that counts."""
BLOCK_SIZE: Final = 16
PARTS: Final = ("scheduler", "sampler", "text")
"""Of a step: what isn't sampling or text is the scheduler, the pool, and the engine's accounts."""
TOKEN_BYTES: Final = 40
"""Of a number in a list, as prompts are."""
MOST_MS: Final = 2.0
"""What a step of 32 sequences may take."""
MOST_UNUSED: Final = 0.04
"""What share of the allocated K/V memory may hold nothing."""

CORE_COLUMNS: Final = (
    *("mode", "sequences", "step p50", "p99", "least"),
    *("scheduler p50", "p99", "sampler p50", "p99", "text p50", "p99"),
)


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """One run."""

    sequences: tuple[int, ...] = (32, 256)
    steps: int = 200
    prompt_tokens: int = 128
    vocabulary: int = 49152
    requests: int = 400
    """Of the mixed load that waste is measured on."""
    seed: int = 0
    threads: int = 0
    """0: as torch decides."""
    tokenizer: Path | None = None
    """A ``tokenizer.json``; None: the prepared model's, or else a made-up one."""


def run_core(config: CoreConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Runs every mode at every number of sequences, then the mixed load; returns what is printed as JSON.

    Raises:
        ValueError: memory has no room for it; the tokenizer can't be read, or has more tokens than the vocabulary.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    check_room(config)
    table, source = _table(config)
    note(f"text of {source}")
    native = best(torch.get_num_threads())
    note(f"kernels: {native.level if native else 'none, torch does all'}")
    bank = peaked_logits(BANK, config.vocabulary, config.seed)
    gc.collect()
    gc.freeze()  # as a worker does when it is loaded
    levels = []
    for mode in MODES:
        for count in config.sequences:
            note(f"{mode}, {count} sequences")
            levels.append({"mode": mode, "sequences": count, **measure_steps(config, mode, count, bank, table, native)})
    note(f"waste: {config.requests} requests of all lengths")
    return {
        "machine": describe_machine(),
        "threads": torch.get_num_threads(),
        "kernels": native.level if native else None,
        "vocabulary": config.vocabulary,
        "prompt_tokens": config.prompt_tokens,
        "steps": config.steps,
        "tokenizer": source,
        "levels": levels,
        "waste": asdict(measure_waste(requests=config.requests, seed=config.seed)),
    }


def tokens_of(config: CoreConfig) -> int:
    """Of a sequence, at most."""
    return config.prompt_tokens + WARM_UP + 4 * config.steps + 2


def blocks_of(config: CoreConfig, count: int) -> int:
    """Of a pool for so many sequences."""
    return count * (-(-tokens_of(config) // BLOCK_SIZE) + 1)


def check_room(config: CoreConfig) -> None:
    """Raises ValueError when this machine's memory can't hold the logits and the largest pool's accounting."""
    most = max(config.sequences)
    logits = 4 * config.vocabulary * (2 * BANK + most)  # the bank, what it is made of, and a step's
    books = BOOKS * blocks_of(config, most) + TOKEN_BYTES * most * config.prompt_tokens
    memory = machine()
    if logits + books > memory.size:
        raise ValueError(
            f"{most} sequences of {config.prompt_tokens} tokens over a vocabulary of {config.vocabulary} take "
            f"{logits + books:,} bytes, and {memory.whose} {gib(memory.size)}: "
            "take fewer --sequences, --prompt-tokens or --vocabulary"
        )


def measure_steps(
    config: CoreConfig, mode: str, count: int, bank: torch.Tensor, table: TokenBytes, native: Native | None
) -> dict[str, dict[str, float]]:
    """Milliseconds of steps in which ``count`` sequences get one token each: the whole, and each of `PARTS`."""
    clock = Clock()
    tokens, num_blocks = tokens_of(config), blocks_of(config, count)
    engine = Engine(
        StandIn(bank, num_blocks=num_blocks, block_size=BLOCK_SIZE, most_rows=count, clock=clock),
        Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE), max_running=count, token_budget=max(512, count), context_length=tokens
        ),
        sampler=TimedSampler(sampler_for(torch.device("cpu"), native), clock),
        text_stream=timed_streams(table, clock),
        eos_token_ids=(),
        fingerprint="core",
    )
    for index in range(count):
        engine.add(_request(config, MODES[mode], index, tokens))
    samples: dict[str, list[float]] = {part: [] for part in ("step", *PARTS)}
    warm, added = WARM_UP, count
    while len(samples["step"]) < config.steps:
        begin = time.perf_counter()
        stepped = engine.step()
        whole = time.perf_counter() - begin
        spent = clock.take()
        stats = stepped.stats
        if stepped.failures:
            raise stepped.failures[0]
        if stats.tokens == stats.sequences == count:
            warm -= 1
            if warm < 0:
                _record(samples, whole, spent)
        # Stop strings do turn up: who ends is followed by another.
        for _ in range(count - stats.running - stats.waiting):
            engine.add(_request(config, MODES[mode], added, tokens))
            added += 1
    return {part: _spread(times) for part, times in samples.items()}


def _record(samples: dict[str, list[float]], whole: float, spent: dict[str, float]) -> None:
    outside = spent["model"]
    sampler, text = spent["sampler"], spent["text"]
    samples["step"].append(1000 * (whole - outside))
    samples["sampler"].append(1000 * sampler)
    samples["text"].append(1000 * text)
    samples["scheduler"].append(1000 * (whole - outside - sampler - text))


def _spread(times: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(times, 50), "p99": percentile(times, 99), "least": min(times)}


def _table(config: CoreConfig) -> tuple[TokenBytes, str]:
    """The bytes of tokens, and where they are from."""
    path = config.tokenizer or prepared_tokenizer()
    if path is not None:
        try:
            table = TokenBytes.from_json(path.read_bytes())
        except Exception as error:  # what the library raises has no better class
            raise ValueError(f"{path}: {error}") from error
        if len(table) <= config.vocabulary:
            return table, "the tokenizer given" if config.tokenizer else "the prepared model's tokenizer"
        if config.tokenizer:
            raise ValueError(f"{path} has {len(table)} tokens, more than the vocabulary's {config.vocabulary}")
    return made_up_table(config.vocabulary), "made-up tokens"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a request asks for."""

    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None


MODES: Final[dict[str, tuple[Kind, ...]]] = {
    "greedy": (Kind(SamplingParams(temperature=0.0)),),
    "temperature 1": (Kind(SamplingParams()),),
    "top_p 0.9": (Kind(SamplingParams(top_p=0.9)),),
    "mixed": (
        Kind(SamplingParams(temperature=0.0)),
        Kind(SamplingParams(temperature=0.7), stop=("\n\nUser:", "</answer>", "### ", " the end of the tale")),
        Kind(SamplingParams(top_p=0.9)),
        Kind(SamplingParams(temperature=0.8, top_k=50)),
        Kind(SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)),
        Kind(SamplingParams(temperature=0.7, top_p=0.95), stop=("\n\n\n", "Observation:")),
        Kind(SamplingParams(), logprobs=5),
        Kind(SamplingParams(min_p=0.05, logit_bias=((5, 1.0), (6, -100.0))), min_tokens=1_000),
    ),
}
"""Of each mode: what its requests ask for, in turn."""


def _request(config: CoreConfig, kinds: Sequence[Kind], index: int, tokens: int) -> Request:
    kind = kinds[index % len(kinds)]
    numbers = torch.Generator().manual_seed(config.seed * 1_000_003 + index)
    prompt = torch.randint(config.vocabulary, (config.prompt_tokens,), generator=numbers).tolist()
    sampling = replace(kind.sampling, seed=index)
    most = tokens - config.prompt_tokens
    stopping = StopParams(
        max_tokens=most,
        min_tokens=min(kind.min_tokens, most),
        stop=kind.stop,
        stop_token_ids=(0,) * bool(kind.min_tokens),
    )
    return Request(str(index), tuple(prompt), sampling, stopping, logprobs=kind.logprobs)


def core_cells(level: dict[str, Any]) -> tuple[Any, ...]:
    """A level's line of the table, in milliseconds."""
    step = level["step"]
    parts = (f"{level[part][rank]:.2f}" for part in PARTS for rank in ("p50", "p99"))
    return (level["mode"], level["sequences"], *(f"{step[rank]:.2f}" for rank in ("p50", "p99", "least")), *parts)


def told_waste(waste: dict[str, Any]) -> str:
    """The mixed load in a sentence."""
    found = Waste(**waste)
    return (
        f"K/V memory: {found.unused:.1%} of {found.slots:.0f} allocated slots unused (at most {MOST_UNUSED:.0%} is the "
        f"aim); {found.requests} requests, {found.choices} choices, {found.sequences:.1f} sequences at once over "
        f"{found.steps} steps, {found.cached:.0%} of prompts found in the cache"
    )
