"""A Llama-like decoder on pages, a whole step in one native call.

A token's logits have the same bits on every path: alone or in a batch, in one chunk or many, decoded or prefilled,
after a prefix of its own or another's, with any number of threads. Nothing is measured for that: each sum goes over its
numbers in one order, in a lane of its own (see ``worker/kernels/native/src``). Builds for other processors may give
other bits, and another fingerprint.

Pages of eight bits keep that promise: a position's keys and values are rounded once, when they are written, by nothing
but themselves. Each number is off by half a step at most, of which the largest of its head has 127.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig

from worker.kernels import probe
from worker.kernels.native import memory
from worker.model.decoder.config import DecoderShape, NotFused, rotary_tables, shape_of
from worker.model.decoder.native import LANES, NativeModel, Step, block_numbers, padded
from worker.model.decoder.weights import read
from worker.model.room import check as check_room
from worker.step import NotFinite, StepRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.kernels.native.library import Native
    from worker.model.loader import ModelFiles, Progress

    Ints = npt.NDArray[np.integer[Any]]

LAYOUT = "octavo-kv/3"
"""Changes whenever the bits of a page may differ from those of an older version for the same tokens."""

_PROBED_TOKENS = 96
"""Of a text whose logits are part of the fingerprint: more than one run of keys."""


class DecoderRunner:
    """A model with its pages. Implements `worker.step.Runner`.

    Args:
        native: the kernels.
        model: weights and pages.
        vocab_size: how many of the logits are ids that may be sampled.
        block_size: of the pages.
        context_length: positions that there are angles for.
    """

    def __init__(
        self, native: Native, model: NativeModel, *, vocab_size: int, block_size: int, context_length: int
    ) -> None:
        self.native = native
        self.model = model
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.num_blocks = model.pages.shape[1]
        self.context_length = context_length
        self.fingerprint = ""
        self.nanoseconds: npt.NDArray[np.int64] | None = None
        """``[SECTIONS]``: what steps take, by section, is added here. None: it isn't measured."""
        self.readings = np.zeros(1, dtype=np.int64)
        """How many times the last step read pages in each layer: sequences on the same ones are read for together."""
        self._run = native.new_run()
        """What steps work in, kept from step to step."""
        self._logits = torch.empty(0, 1)
        self._bytes: npt.NDArray[np.uint8] = model.pages.view(torch.uint8).numpy()
        """``[layers, blocks, bytes of a block]``: the pages themselves."""

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, in all layers."""
        pages = self.model.pages
        return pages.shape[0] * pages.shape[2] * pages.itemsize // self.block_size

    @property
    def page_bytes(self) -> int:
        """Of a block, in all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def page_layout(self) -> str:
        """The kernels of all levels lay the same numbers out alike."""
        return f"{LAYOUT} {self.model.pages_dtype}"

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Runs one step; returns float32 logits ``[sum of the rows' logits, vocab_size]``, in order. They hold until
        the next call.

        The logits of a row that left anything in its pages that is not finite are all NaN.

        Raises:
            NotFinite: so did a row that asked for no logits. Nothing of this step may be used by others.
            MemoryError: there is none for what a step works in.
            ValueError: a token, a position or a block that there is not.
        """
        if any(not 0 <= row.logits <= len(row.token_ids) or not row.token_ids for row in rows):
            raise ValueError("a row has no tokens, or wants logits of more tokens than it has")
        counts = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        firsts = np.concatenate([[0], counts.cumsum()])
        total = int(firsts[-1])
        token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int32, total)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        positions = (np.arange(total) + np.repeat(starts - firsts[:-1], counts)).astype(np.int32)
        lengths = np.array([len(row.block_table) for row in rows], dtype=np.int64)
        tables = np.fromiter(chain.from_iterable(row.block_table for row in rows), np.int32, int(lengths.sum()))
        table_starts = np.concatenate([[0], lengths.cumsum()])
        wanted = np.array([row.logits for row in rows], dtype=np.int64)
        asked = int(wanted.sum())
        wanted_rows = np.arange(asked) + np.repeat(firsts[1:] - wanted.cumsum(), wanted)
        logits = self._room(asked)
        damaged = np.zeros(len(rows), dtype=np.uint8)
        self._checked(token_ids, positions, tables, lengths, starts + counts)
        self.native.call(
            "decode",
            Step(
                run=self._run.address,
                decoder=ctypes.pointer(self.model.decoder),
                rows=total,
                token_ids=token_ids.ctypes.data,
                positions=positions.ctypes.data,
                sequences=len(rows),
                first_rows=firsts.ctypes.data,
                tables=tables.ctypes.data,
                table_starts=table_starts.ctypes.data,
                wanted=asked,
                wanted_rows=wanted_rows.ctypes.data,
                logits=logits.data_ptr(),
                logits_stride=logits.stride(0),
                damaged=damaged.ctypes.data,
                nanoseconds=None if self.nanoseconds is None else self.nanoseconds.ctypes.data,
                readings=self.readings.ctypes.data,
            ),
        )
        logits = logits[:, : self.vocab_size]
        for index in np.flatnonzero(damaged).tolist():
            if not rows[index].logits:
                raise NotFinite("the keys or values of a chunk are not finite")
            first = int(wanted[:index].sum())
            logits[first : first + rows[index].logits] = torch.nan
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks of all layers, ``(from, to)`` each."""
        sources, targets = (torch.tensor(column) for column in zip(*pairs, strict=True))
        self.model.pages[:, targets] = self.model.pages[:, sources]

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """What these blocks hold: layer by layer, as it lies in memory."""
        return [self._bytes[:, block].tobytes() for block in blocks]

    def write_blocks(self, blocks: Sequence[int], payloads: Sequence[bytes | memoryview]) -> None:
        """Makes these blocks hold that. ValueError for a payload of another size than ``page_bytes``."""
        if any(len(payload) != self.page_bytes for payload in payloads):
            raise ValueError(f"a page of this model has {self.page_bytes} bytes")
        for block, payload in zip(blocks, payloads, strict=True):
            self._bytes[:, block] = np.frombuffer(payload, np.uint8).reshape(len(self._bytes), -1)

    def _room(self, rows: int) -> torch.Tensor:
        """Memory for logits, used again in each step: fresh memory costs more than what is written to it."""
        if len(self._logits) < rows:
            width = padded(int(self.model.decoder.head.outputs), 64)
            self._logits = memory.zeros(padded(rows, 16), width, dtype=torch.float32)
        return self._logits[:rows]

    def _checked(self, token_ids: Ints, positions: Ints, tables: Ints, lengths: Ints, ends: Ints) -> None:
        """The kernels believe what they are told; here is the last look at it."""
        for name, numbers, limit in (
            ("token id", token_ids, int(self.model.decoder.head.outputs)),
            ("position", positions, self.context_length),
            ("block", tables, self.num_blocks),
        ):
            if numbers.min() < 0 or numbers.max() >= limit:
                raise ValueError(f"a {name} is not 0 to {limit - 1}: {numbers.min()} to {numbers.max()}")
        if (lengths * self.block_size < ends).any():
            raise ValueError("a block table is too short for its tokens")


def load(
    files: ModelFiles,
    native: Native,
    *,
    num_blocks: int,
    block_size: int,
    eight_bit_pages: bool = False,
    progress: Progress,
) -> DecoderRunner:
    """Reads the weights, packs them, and allocates ``num_blocks`` blocks of ``block_size`` positions: of the model's
    dtype, or of eight bits.

    Raises:
        NotFused: this decoder can't compute exactly what the model's configuration asks for.
        NoRoom: for so many blocks.
        ModelDamaged: tensors missing, unexpected or of another shape.
    """
    shape, tables = _described(files)
    if block_size % LANES:
        raise NotFused(f"blocks of {block_size} tokens are no multiple of {LANES}")
    kept_as = torch.int8 if eight_bit_pages else files.dtype
    numbers = block_numbers(shape, block_size, eight_bit_pages=eight_bit_pages)
    check_room(num_blocks, block_size, len(shape.layers) * numbers * kept_as.itemsize)  # before reading takes its time
    progress(f"reading {files.name} as {files.dtype_name}")
    weights = read(files.directory, shape, files.dtype)
    model = NativeModel(
        shape,
        weights,
        tables,
        num_blocks=num_blocks,
        block_size=block_size,
        quantized=files.quantized,
        eight_bit_pages=eight_bit_pages,
    )
    runner = DecoderRunner(
        native,
        model,
        vocab_size=min(files.vocab_size, shape.vocab),
        block_size=block_size,
        context_length=files.context_length,
    )
    pages_dtype = str(model.pages_dtype).removeprefix("torch.")
    runner.fingerprint = _fingerprint(files, shape, pages_dtype, _probed(runner, tables))
    progress(
        f"fused decoder, kernels for {native.level} on {native.threads} thread(s); "
        f"{num_blocks} blocks of {block_size}, K/V {pages_dtype}, {runner.bytes_per_token} bytes a token"
    )
    return runner


def why_not_fused(files: ModelFiles) -> str | None:
    """Why this decoder can't run a model, as far as its configuration tells; None: it can."""
    try:
        _described(files)
    except NotFused as reason:
        return str(reason)
    return None


def _described(files: ModelFiles) -> tuple[DecoderShape, tuple[tuple[torch.Tensor, torch.Tensor], ...]]:
    if files.device.type != "cpu":
        raise NotFused(f"device {files.device.type}: the kernels are for processors")
    config = AutoConfig.from_pretrained(files.directory, local_files_only=True)
    shape = shape_of(config, files.dtype)
    return shape, rotary_tables(config, shape, files.context_length)


def _probed(runner: DecoderRunner, tables: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Digest of a short text's logits, in which all that decides bits takes part, and of the angles of longer ones."""
    count = min(_PROBED_TOKENS, runner.context_length, runner.num_blocks * runner.block_size)
    text = [(11 + 7 * index) % runner.vocab_size for index in range(count)]
    used = -(-count // runner.block_size)
    logits = runner.forward([StepRow(text, 0, list(range(used)), count)])
    digest = probe.digest([logits, *(number for table in tables for number in table)])
    runner.model.pages[:, :used] = 0  # and not all of them: memory is taken when it is first written
    return digest


def _fingerprint(files: ModelFiles, shape: DecoderShape, pages_dtype: str, probed: str) -> str:
    parts: dict[str, Any] = {
        "layout": LAYOUT,
        "weights": files.digest,
        "shape": asdict(shape),
        "dtype": files.dtype_name,
        "kv_dtype": pages_dtype,
        "logits": probed,
        "tokenizer": hashlib.sha256(files.tokenizer_json).hexdigest(),
        "tokenizer_config": hashlib.sha256(files.tokenizer_config).hexdigest(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
