"""`octavo bench kernels`: each part of a step of the fused decoder beside what this machine can do.

The kernels take the time of their own parts (``watch.h``), in whole steps as a worker makes them: each part finds
caches and threads as it does in service. Pages are filled with numbers first.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from transformers import AutoConfig

from bench.kernels_ceiling import Memory, peak
from bench.kernels_model import needed_kernels
from bench.kernels_table import CALL, Ceilings, Sampled, Stepped, Timed, peaks_needed, sampled_line, step_lines
from bench.kernels_work import Load
from bench.machine import describe_machine
from bench.standin import BANK, peaked_logits
from worker.model import loader
from worker.model.decoder import runner as decoder
from worker.model.decoder.config import NotFused, shape_of
from worker.model.decoder.native import SECTIONS, padded
from worker.model.errors import ModelUnsupported, NoRoom
from worker.model.room import check as check_room
from worker.model.room import gib, left
from worker.params import SamplingParams
from worker.sampling.draw import Draw
from worker.sampling.native import NativeSampler
from worker.step import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.kernels.native.library import Native
    from worker.model.decoder.runner import DecoderRunner
    from worker.model.loader import ModelFiles

BLOCK_SIZE: Final = 16
WARM_UP: Final = 2
"""Steps before the first that counts."""
ATTENTION: Final = ("write", "attend")
"""The parts that depend on how long a text is."""
ATTENDING: Final = 8
"""Sequences that decode where only these are told."""
CHUNK: Final = 128
"""Tokens of a prompt there."""
SAMPLED: Final = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """One run."""

    model: str = "smollm2-135m"
    dtypes: tuple[str, ...] = ("bfloat16", "float32", "int8")
    sequences: tuple[int, ...] = (1, 8, 32)
    """That decode one token each."""
    contexts: tuple[int, ...] = (192, 512)
    """Tokens before the one that is decoded."""
    prompts: tuple[int, ...] = (128, 512)
    """Tokens of a prompt that are computed in one step."""
    attention: tuple[int, ...] = (64, 512, 4096)
    """Tokens before those of steps of which only `ATTENTION` is told."""
    turns: int = 15
    """Of each measurement."""
    read_mib: int = 512
    """Of memory, over which reading is measured."""
    kernels: str = "auto"
    threads: int = 0
    """0: as torch decides."""
    cache_dir: Path = Path("~/.cache/octavo")


def run_kernels(config: KernelsConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures all parts in all steps; returns what is written as JSON, times in seconds.

    Raises:
        ModelError: the model can't be found or read, or not run by the fused decoder.
        MemoryError: there is none for so long texts.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    native = needed_kernels(config.kernels, torch.get_num_threads(), "they are what is measured")
    if config.read_mib << 20 > left().size:
        raise MemoryError(f"--read-mib {config.read_mib}: {left().whose} {gib(left().size)}; take less")
    machine = describe_machine()
    note(f"kernels: {native.level}, {native.threads} threads")
    memory = Memory(native, config.read_mib << 20)
    memory.read()
    peaks = {dtype: peak(native, dtype) for dtype in peaks_needed(config.dtypes)}
    steps: list[tuple[Stepped, Sequence[str]]] = []
    vocab = 0
    for dtype in config.dtypes:
        files = loader.resolve(config.model, cache_dir=config.cache_dir, dtype=dtype, device="cpu", progress=note)
        vocab = files.vocab_size
        steps += measure_model(native, files, config, note)
        memory.read()  # a machine that others use, too, is not the same all the time
    note("sampler")
    samples = [sample(native, mode, rows, vocab, config.turns) for mode in SAMPLED for rows in config.sequences]
    memory.read()
    peaks = {
        dtype: max(one, peak(native, dtype), key=lambda each: each.operations_per_s) for dtype, one in peaks.items()
    }
    ceilings = Ceilings(memory.best, peaks)
    lines = [line for step, only in steps for line in step_lines(step, only, ceilings)]
    return {
        "machine": machine,
        "config": {**asdict(config), "cache_dir": str(config.cache_dir)},
        "threads": native.threads,
        "kernels": native.level,
        "ceilings": asdict(ceilings),
        "lines": [*lines, *(sampled_line(found, ceilings) for found in samples)],
    }


def loads(config: KernelsConfig, context_length: int, note: Callable[[str], None]) -> list[tuple[Load, Sequence[str]]]:
    """All steps, and of which parts each tells: none for all. Those that a model's context is too short for are left
    out, which is told."""
    asked: list[tuple[Load, Sequence[str]]] = [
        *((Load(count, 1, context), ()) for count in config.sequences for context in config.contexts),
        *((Load(1, tokens, 0), ()) for tokens in config.prompts),
        *((Load(ATTENDING, 1, context), ATTENTION) for context in config.attention),
        *((Load(1, CHUNK, context), ATTENTION) for context in config.attention),
    ]
    for load, _ in asked:
        if load.context + load.new > context_length:
            note(f"left out: {load.name}, the model has {context_length} positions")
    return [(load, only) for load, only in asked if load.context + load.new <= context_length]


def measure_model(
    native: Native, files: ModelFiles, config: KernelsConfig, note: Callable[[str], None]
) -> list[tuple[Stepped, Sequence[str]]]:
    """All steps of a model in one dtype.

    Raises:
        ModelUnsupported: it isn't run by the fused decoder.
        ModelDamaged: its weights.
        MemoryError: there is none for so long texts.
    """
    wanted = loads(config, files.context_length, note)
    blocks = max((load.sequences * blocks_of(load) for load, _ in wanted), default=1)
    try:
        shape = shape_of(AutoConfig.from_pretrained(files.directory, local_files_only=True), files.dtype)
        runner = decoder.load(files, native, num_blocks=blocks, block_size=BLOCK_SIZE, progress=note)
        check_room(blocks, BLOCK_SIZE, runner.page_bytes, left())  # all of it is written to
    except NoRoom as error:
        raise MemoryError(f"{error}: take fewer --sequences, or shorter texts") from error
    except NotFused as reason:
        raise ModelUnsupported(f"{files.name} is not run by the fused decoder: {reason}") from reason
    fill(runner.model.pages)
    found = []
    for load, only in wanted:
        note(f"{files.dtype_name}: {load.name}")
        parts, whole = time_step(runner, load, config.turns)
        found.append((Stepped(files.dtype_name, shape, load, parts, whole), only))
    del runner
    gc.collect()  # before the next one is read
    return found


def fill(pages: torch.Tensor) -> None:
    """Puts numbers into all pages: those that were never written are the same few zeros, which a cache would have."""
    block = torch.empty(pages.shape[2]).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    pages[:] = block.to(pages.dtype)


def time_step(runner: DecoderRunner, load: Load, turns: int) -> tuple[dict[str, Timed], Timed]:
    """The times of a step's sections, of what is around them (`CALL`), and of the whole, each the same step again."""
    each = blocks_of(load)
    rows = [
        StepRow(
            [(11 + 7 * index + 3 * sequence) % runner.vocab_size for index in range(load.new)],
            load.context,
            list(range(sequence * each, (sequence + 1) * each)),
            1,
        )
        for sequence in range(load.sequences)
    ]
    taken, wholes = [], []
    for _ in range(WARM_UP + turns):
        runner.nanoseconds = np.zeros(len(SECTIONS), dtype=np.int64)
        begin = time.perf_counter()
        runner.forward(rows)
        wholes.append(time.perf_counter() - begin)
        inside = runner.nanoseconds / 1e9
        taken.append([*inside, wholes[-1] - inside.sum()])
    runner.nanoseconds = None
    counted = np.array(taken[WARM_UP:])
    parts = {section: Timed.of(counted[:, index].tolist()) for index, section in enumerate((*SECTIONS, CALL))}
    return parts, Timed.of(wholes[WARM_UP:])


def sample(native: Native, mode: str, rows: int, vocab: int, turns: int) -> Sampled:
    """The time in which a token is chosen for each row of logits that have just been written, as a model's are."""
    sampler = NativeSampler(native)
    bank = peaked_logits(min(BANK, 2 * rows), vocab, 0)
    logits = torch.empty(rows, vocab)
    draws = [Draw(row, SAMPLED[mode], 0, 0) for row in range(rows)]
    seconds = []
    for turn in range(WARM_UP + turns):
        torch.index_select(bank, 0, (torch.arange(rows) + turn) % len(bank), out=logits)
        begin = time.perf_counter()
        sampler.draw(logits, draws)
        seconds.append(time.perf_counter() - begin)
    return Sampled(mode, rows, vocab, Timed.of(seconds[WARM_UP:]))


def blocks_of(load: Load) -> int:
    """Of one sequence."""
    return padded(load.context + load.new, BLOCK_SIZE) // BLOCK_SIZE
