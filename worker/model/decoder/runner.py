"""A Llama-like decoder on pages, a whole step in one native call.

A token's logits have the same bits on every path: alone or in a batch, in one chunk or many, decoded or prefilled, after
a prefix of its own or another's, with any number of threads. Nothing is measured for that: each sum goes over its
numbers in one order, in a lane of its own (see ``worker/kernels/native/src``). Builds for other processors may give other
bits, and another fingerprint.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from worker.kernels import probe
from worker.model.decoder.native import NativeModel, Step, padded
from worker.model.errors import NotFinite
from worker.step import StepRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.kernels.native.library import Native
    from worker.model.decoder.config import DecoderShape

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
    """

    def __init__(self, native: Native, model: NativeModel, *, vocab_size: int, block_size: int) -> None:
        self.native = native
        self.model = model
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.num_blocks = model.pages.shape[1]
        self.fingerprint = ""
        self._run = native.new_run()
        self._logits = torch.empty(0)

    def forward(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Runs one step; returns float32 logits ``[sum of the rows' logits, vocab_size]``, in order. The next call takes
        them away.

        The logits of a row that left anything in its pages that is not finite are all NaN.

        Raises:
            NotFinite: so did a row that asked for no logits. Nothing of this step may be used by others.
            MemoryError: there is none for what a step works in.
        """
        counts = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        firsts = np.concatenate([[0], counts.cumsum()])
        total = int(firsts[-1])
        token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int32, total)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        positions = (np.arange(total) + np.repeat(starts - firsts[:-1], counts)).astype(np.int32)
        lengths = [len(row.block_table) for row in rows]
        tables = np.fromiter(chain.from_iterable(row.block_table for row in rows), np.int32, sum(lengths))
        table_starts = np.concatenate([[0], np.cumsum(lengths)])
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

    def _room(self, rows: int) -> torch.Tensor:
        """Memory for logits, used again in each step: fresh memory costs more than what is written to it."""
        if len(self._logits) < rows:
            self._logits = torch.empty(padded(rows, 16), padded(int(self.model.decoder.head.outputs), 64))
        return self._logits[:rows]

    def _checked(self, token_ids: Any, positions: Any, tables: Any, lengths: Sequence[int], ends: Any) -> None:
        """The kernels believe what they are told; here is the last look at it."""
        decoder = self.model.decoder
        assert token_ids.min() >= 0
        assert token_ids.max() < decoder.head.outputs
        assert positions.min() >= 0
        assert tables.min() >= 0
        assert tables.max() < self.num_blocks
        assert (np.array(lengths) * self.block_size >= ends).all()
