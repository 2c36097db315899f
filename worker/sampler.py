"""Choosing the next token of every sequence in one go.

A row's token depends on its logits, its parameters and its random number, and on nothing else: not on the other rows,
nor on how many there are, nor on the number of threads. Two things see to that:

- randomness is a function of (seed, choice, position), computed by Philox4x32-10, a counter-based generator;
- masses are rounded down to whole units (2^-37 of the likeliest token's, where there are 49152 tokens) before they are
  added up. Sums of such numbers are exact in float64, so a cumulative distribution is the same whichever way it is
  computed, and what has no probability gets none.

Ties are broken by the lower token id. The parts: ``logit_rows`` has the passes over whole vocabularies, ``adjust`` what
requests change about logits, ``choose`` the inversion of distributions, ``likeliest`` the top of a row, ``logprobs``
what is told of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from worker import choose
from worker.adjust import Adjuster, adjusts
from worker.draw import Drawn, TokenLogprobs
from worker.likeliest import MOST_ROWS
from worker.logit_rows import MOST, LogitRows, Scratch, Wanted
from worker.logprobs import token_logprobs
from worker.philox import uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.draw import Draw, Score
    from worker.likeliest import Flags
    from worker.logit_rows import Doubles, Floats, Ints

AT_ONCE: Final = MOST_ROWS
"""Draws, or scores, that are made at once. It bounds the buffers too, which hold a row for each of them at most."""

LARGE_SHARE: Final = 0.5
"""From which ``top_p`` on tokens are drawn from all until one is within it."""

NON_FINITE: Final = "non-finite logits"
NOTHING_LEFT: Final = "no token can be chosen: all that the model leaves possible are banned"


class TorchSampler:
    """Implements ``worker.draw.Sampler``. One caller at a time: it keeps its buffers."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._adjuster = Adjuster()

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Choose a token for each draw, from float32 ``[rows, vocabulary]`` on any device.

        A token with logit -inf is never chosen. A row with a NaN or +inf, or nothing but -inf, or of which all is
        banned, gives an error.
        """
        with torch.inference_mode():
            parts = (draws[start : start + AT_ONCE] for start in range(0, len(draws), AT_ONCE))
            return [drawn for part in parts for drawn in self._draw(logits, part)]

    def score(self, logits: torch.Tensor, scores: Sequence[Score]) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens; -inf of one that can't be chosen, NaN in a row that is no distribution."""
        with torch.inference_mode():
            parts = (scores[start : start + AT_ONCE] for start in range(0, len(scores), AT_ONCE))
            return [scored for part in parts for scored in self._score(logits, part)]

    def _draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        batch = _Batch(draws, logits.shape[1])
        rows = LogitRows(logits, batch.rows, batch.wanted(0, len(batch.rows)), self._scratch)
        if batch.changed:
            buffer = rows.buffer("adjusted", len(batch.changed), logits.device)
            rows.copy_into(buffer, batch.places[batch.changed])
            self._adjuster.adjust(buffer, [draws[index] for index in batch.changed])
            rows.add(buffer, batch.wanted(len(batch.rows), len(batch.rows) + len(batch.changed)))
        sound = np.isfinite(rows.highest[batch.places])
        possible = sound & np.isfinite(rows.highest[batch.used])
        tokens = batch.tokens(rows, possible).tolist()
        logprobs = batch.logprobs(rows, possible, tokens)
        return [
            Drawn(token, about) if fine else Drawn(None, error=NOTHING_LEFT if finite else NON_FINITE, finite=finite)
            for token, about, fine, finite in zip(tokens, logprobs, possible.tolist(), sound.tolist(), strict=True)
        ]

    def _score(self, logits: torch.Tensor, scores: Sequence[Score]) -> list[TokenLogprobs]:
        distinct, places = _distinct([score.row for score in scores])
        every = Wanted(np.arange(len(distinct)), np.ones(len(distinct), dtype=np.float32))
        rows = LogitRows(logits, distinct, every, self._scratch)
        result = [TokenLogprobs(score.token_id, math.nan) for score in scores]
        good = np.flatnonzero(np.isfinite(rows.highest[places]))
        if len(good):
            some, wanted = [scores[index] for index in good.tolist()], places[good]
            ids, tops = [score.token_id for score in some], [score.top for score in some]
            for index, scored in zip(good.tolist(), token_logprobs(rows, wanted, wanted, ids, tops), strict=True):
                result[index] = scored
        return result


class _Batch:
    """Draws that are made at once. Those without adjustments use the model's rows, the others have one each behind."""

    def __init__(self, draws: Sequence[Draw], vocabulary: int) -> None:
        self.draws = draws
        self.rows, self.places = _distinct([draw.row for draw in draws])
        """The numbers of the rows of logits, and which of them each draw has."""
        self.changed = [index for index, draw in enumerate(draws) if adjusts(draw)]
        """The draws with adjustments."""
        self.used = self.places.copy()
        """The row that each draw is from."""
        self.used[self.changed] = range(len(self.rows), len(self.rows) + len(self.changed))
        self.params = [draw.params for draw in draws]
        degrees, top_p, min_p = np.array([(p.temperature, p.top_p, p.min_p) for p in self.params]).T
        self.degrees = np.minimum(degrees, MOST).astype(np.float32)
        """Temperatures, as float32 can hold them."""
        top_k = [p.top_k if p.top_k < vocabulary else 0 for p in self.params]
        self.top_k, self.top_p, self.min_p = np.array(top_k, dtype=np.int64), top_p, min_p
        self.greedy = np.array([p.greedy for p in self.params])
        self.told = [index for index, draw in enumerate(draws) if draw.logprobs is not None]
        """The draws whose log-probabilities are wanted."""
        summed = ~self.greedy & (self.top_k == 0) & ((top_p < 1) | (min_p == 0))
        own = _keys(self.used, self.degrees)
        told = _keys(self.places[self.told], np.ones(len(self.told), dtype=np.float32))
        self._wanted = np.unique(np.concatenate([own[summed], told]))
        """The rows, with temperatures, whose weights have to be summed."""
        self.slots = np.searchsorted(self._wanted, own)
        """Which of these each draw has; any, if it needs none."""
        self.told_slots = np.searchsorted(self._wanted, told)

    def wanted(self, first: int, past: int) -> Wanted:
        """Rows whose weights have to be summed, of those from ``first`` on and before ``past``."""
        rows = self._wanted >> 32
        some = (first <= rows) & (rows < past)
        return Wanted(rows[some], self._wanted[some].astype(np.uint32).view(np.float32))

    def tokens(self, rows: LogitRows, possible: Flags) -> Ints:
        """A token for each draw; any where there is none that is possible."""
        tokens = np.zeros(len(self.draws), dtype=np.int64)
        some = np.flatnonzero(possible & self.greedy)
        if len(some):
            tokens[some] = choose.likeliest(rows, self.used[some])
        drawn = possible & ~self.greedy
        if not drawn.any():
            return tokens
        whole = (self.top_k == 0) & (self.top_p == 1) & (self.min_p == 0)
        nucleus = (self.top_k == 0) & (self.top_p >= LARGE_SHARE) & (self.top_p < 1)
        numbers = uniforms(
            [each.seed for each in self.params],
            [draw.choice for draw in self.draws],
            [draw.position for draw in self.draws],
            choose.TRIES + 1 if nucleus.any() else 1,
        )
        for kind, chosen_from in (
            (whole, self._from_all),
            (nucleus, self._from_nucleus),
            (~whole & ~nucleus, self._from_likeliest),
        ):
            some = np.flatnonzero(drawn & kind)
            if len(some):
                tokens[some] = chosen_from(rows, some, numbers[:, some])
        return tokens

    def _from_all(self, rows: LogitRows, some: Ints, numbers: Doubles) -> Ints:
        slots = self.slots[some]
        return choose.from_all(rows, self.used[some], rows.sum_scales.of(slots), numbers[0], rows.masses(slots))

    def _from_nucleus(self, rows: LogitRows, some: Ints, numbers: Doubles) -> Ints:
        scales, masses = rows.sum_scales.of(self.slots[some]), rows.masses(self.slots[some])
        return choose.from_nucleus(rows, self.used[some], scales, numbers, masses, self._restriction(some))

    def _from_likeliest(self, rows: LogitRows, some: Ints, numbers: Doubles) -> Ints:
        scales = rows.scales(self.used[some], self.degrees[some])
        return choose.from_likeliest(rows, self.used[some], scales, numbers[0], self._restriction(some))

    def _restriction(self, some: Ints) -> choose.Restriction:
        return choose.Restriction(self.top_k[some], self.top_p[some], self.min_p[some], self.slots[some])

    def logprobs(self, rows: LogitRows, possible: Flags, tokens: Sequence[int]) -> list[TokenLogprobs | None]:
        """Of each draw's token, where it is wanted and there is one."""
        result: list[TokenLogprobs | None] = [None] * len(self.draws)
        told = [(index, slot) for index, slot in zip(self.told, self.told_slots, strict=True) if possible[index]]
        if told:
            some, slots = [index for index, _ in told], np.array([slot for _, slot in told])
            ids, tops = [tokens[index] for index in some], [self.draws[index].logprobs or 0 for index in some]
            for index, one in zip(some, token_logprobs(rows, self.places[some], slots, ids, tops), strict=True):
                result[index] = one
        return result


def _keys(rows: Ints, temperatures: Floats) -> Ints:
    """Numbers that rise with the row, each for one row and temperature."""
    return rows << 32 | temperatures.view(np.uint32)


def _distinct(numbers: Sequence[int]) -> tuple[list[int], Ints]:
    """The numbers, each once, rising; and where each is among them."""
    distinct = sorted(set(numbers))
    places = {number: place for place, number in enumerate(distinct)}
    return distinct, np.array([places[number] for number in numbers], dtype=np.int64)
