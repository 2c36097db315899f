"""Steps of a real decoder, on one memory of pages that is cut into blocks of any size."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

import torch

from bench.kernels_model import needed_kernels
from worker.model import loader
from worker.model.decoder import runner as decoder
from worker.model.decoder.config import NotFused
from worker.model.decoder.native import LANES, Decoder
from worker.model.errors import ModelUnsupported, NoRoom
from worker.model.room import check as check_room
from worker.model.room import left
from worker.step import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from worker.model.decoder.native import NativeModel
    from worker.model.decoder.runner import DecoderRunner

BLOCK_STEP = LANES
"""Blocks are multiples of this, in tokens."""


class Subject:
    """The model that is measured. Its weights are there once, however many sizes of blocks are tried."""

    def __init__(self, runner: DecoderRunner) -> None:
        self.level = runner.native.level
        self.threads = runner.native.threads
        self.dtype = str(runner.model.weights_dtype).removeprefix("torch.")
        self.context_length = runner.context_length
        self.kv_tokens = runner.num_blocks * runner.block_size
        self._runner = runner
        self._cuts = {runner.block_size: runner}
        # Memory that was never written to is not there, and reading it costs nothing.
        layer = torch.randn(runner.model.pages.shape[1:], generator=torch.Generator().manual_seed(0))
        runner.model.pages.copy_(layer)

    def num_blocks(self, block_size: int) -> int:
        """How many of this size there are."""
        return self.kv_tokens // block_size

    def step(self, block_size: int, tables: Sequence[list[int]], context: int) -> float:
        """Seconds in which each of these tables' sequences gets the token at the end of ``context``."""
        rows = [StepRow([index % self._runner.vocab_size], context - 1, table, 1) for index, table in enumerate(tables)]
        runner = self._cut(block_size)
        begin = time.perf_counter()
        runner.forward(rows)
        return time.perf_counter() - begin

    def _cut(self, block_size: int) -> DecoderRunner:
        if block_size not in self._cuts:
            self._cuts[block_size] = decoder.DecoderRunner(
                self._runner.native,
                cut(self._runner.model, block_size),
                vocab_size=self._runner.vocab_size,
                block_size=block_size,
                context_length=self.context_length,
            )
        return self._cuts[block_size]


def cut(model: NativeModel, block_size: int) -> NativeModel:
    """The same weights and pages in blocks of another size. What the pages held means nothing there."""
    layers, blocks, numbers = model.pages.shape
    own = int(model.decoder.block_size)
    count = blocks * own // block_size
    structure = Decoder.from_buffer_copy(model.decoder)
    structure.block_size = block_size
    pages = model.pages.view(layers, -1)[:, : count * block_size * (numbers // own)].view(layers, count, -1)
    made = copy.copy(model)
    vars(made).update(pages=pages, decoder=structure)  # both are for good, but not in a copy that nobody has seen
    return made


def load(
    model: str, *, dtype: str, kernels: str, threads: int, kv_tokens: int, cache_dir: Path, note: Callable[[str], None]
) -> Subject:
    """Loads a model with pages for ``kv_tokens`` tokens, as a worker does.

    Raises:
        ModelError: it can't be found or read, no native kernels run it, or memory has no room for the pages.
    """
    if threads:
        torch.set_num_threads(threads)
    native = needed_kernels(kernels, torch.get_num_threads(), "blocks are tuned for them")
    files = loader.resolve(model, cache_dir=cache_dir, dtype=dtype, device="cpu", progress=note)
    try:
        runner = decoder.load(files, native, num_blocks=kv_tokens // BLOCK_STEP, block_size=BLOCK_STEP, progress=note)
        check_room(runner.num_blocks, BLOCK_STEP, runner.page_bytes, left())  # a subject writes to all of it
    except NoRoom as error:
        raise error.as_option(kv_tokens) from error
    except NotFused as reason:
        raise ModelUnsupported(f"{files.name} doesn't run in the fused decoder: {reason}") from reason
    torch.set_num_threads(1)  # as in a worker
    return Subject(runner)
