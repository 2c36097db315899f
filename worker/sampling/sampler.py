"""Choosing the next token of every sequence in one go: by torch on any device, or by native kernels, see ``native``.

A row's token depends on its logits, its parameters and its random number, and on nothing else: not on the other rows,
nor on how many there are, nor on the number of threads. Two things see to that:

- randomness is a function of (seed, choice, position), computed by Philox4x32-10, a counter-based generator;
- masses are rounded down to whole units (2^-37 of the likeliest token's, where there are 49152 tokens) before they are
  added up. Sums of such numbers are exact in float64, so a cumulative distribution is the same whichever way it is
  computed, and what has no probability gets none.

Ties are broken by the lower token id. The parts: ``scan`` has the passes over whole vocabularies, ``logit_rows`` what
they found, ``adjust`` what requests change about logits, ``batch`` who needs what, ``choose`` the choosing,
``likeliest`` the top of a row, ``logprobs`` what is told of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from worker.sampling.adjust import adjust
from worker.sampling.batch import Batch, distinct_rows
from worker.sampling.draw import NON_FINITE, NOTHING_LEFT, Drawn, TokenLogprobs
from worker.sampling.likeliest import MOST_ROWS
from worker.sampling.logit_rows import LogitRows, Scratch, Wanted
from worker.sampling.logprobs import token_logprobs
from worker.sampling.native import NativeSampler
from worker.sampling.scan import Scanner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.kernels.native.library import Native
    from worker.sampling.draw import Draw, Logits, Score

AT_ONCE: Final = MOST_ROWS
"""Draws, or scores, that are made at once. It bounds the buffers too, which hold a row for each of them at most."""


class TorchSampler:
    """Implements ``worker.sampling.draw.Sampler``. One caller at a time: it keeps its buffers."""

    def __init__(self) -> None:
        self._scanner = Scanner()
        self._scratch = Scratch()

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what decides the bits of its results, beside what it is given."""
        return self._scanner.digest

    def draw(self, logits: Logits, draws: Sequence[Draw]) -> list[Drawn]:
        """Choose a token for each draw, from float32 ``[rows, vocabulary]`` on any device.

        A token with logit -inf is never chosen. A row with a NaN or +inf, or nothing but -inf, or of which all is
        banned, gives an error.
        """
        with torch.inference_mode():
            parts = (draws[start : start + AT_ONCE] for start in range(0, len(draws), AT_ONCE))
            return [drawn for part in parts for drawn in self._draw(torch.as_tensor(logits), part)]

    def score(self, logits: Logits, scores: Sequence[Score]) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens; -inf of one that can't be chosen, NaN in a row that is no distribution."""
        with torch.inference_mode():
            parts = (scores[start : start + AT_ONCE] for start in range(0, len(scores), AT_ONCE))
            return [scored for part in parts for scored in self._score(torch.as_tensor(logits), part)]

    def _draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        batch = Batch(draws, logits.shape[1])
        rows = LogitRows(logits, batch.rows, batch.wanted(0, len(batch.rows)), self._scanner, self._scratch)
        if batch.changed:
            buffer = rows.buffer("adjusted", len(batch.changed), logits.device)
            rows.copy_into(buffer, batch.places[batch.changed])
            adjust(buffer, [draws[index] for index in batch.changed])
            rows.add(buffer, batch.wanted(len(batch.rows), len(batch.rows) + len(batch.changed)))
        sound = np.isfinite(rows.highest[batch.places])
        possible = sound & np.isfinite(rows.highest[batch.used])
        tokens = batch.tokens(rows, possible)
        logprobs = batch.logprobs(rows, possible, tokens)
        return [
            Drawn(token, about) if fine else Drawn(None, error=NOTHING_LEFT if finite else NON_FINITE, finite=finite)
            for token, about, fine, finite in zip(tokens, logprobs, possible.tolist(), sound.tolist(), strict=True)
        ]

    def _score(self, logits: torch.Tensor, scores: Sequence[Score]) -> list[TokenLogprobs]:
        distinct, places = distinct_rows([score.row for score in scores])
        every = Wanted(np.arange(len(distinct)), np.ones(len(distinct), dtype=np.float32))
        rows = LogitRows(logits, distinct, every, self._scanner, self._scratch)
        result = [TokenLogprobs(score.token_id, math.nan) for score in scores]
        good = np.flatnonzero(np.isfinite(rows.highest[places]))
        if len(good):
            some, wanted = [scores[index] for index in good.tolist()], places[good]
            ids, tops = [score.token_id for score in some], [score.top for score in some]
            for index, scored in zip(good.tolist(), token_logprobs(rows, wanted, wanted, ids, tops), strict=True):
                result[index] = scored
        return result


def sampler_for(device: torch.device, native: Native | None) -> TorchSampler | NativeSampler:
    """The fastest for logits on a device, with these kernels."""
    return NativeSampler(native) if native is not None and device.type == "cpu" else TorchSampler()
