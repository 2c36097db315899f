"""Several draws in one go: which rows each is from, what those must be asked, and which way each token is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from worker.sampling import choose
from worker.sampling.adjust import adjusts
from worker.sampling.logit_rows import MOST, Wanted
from worker.sampling.logprobs import token_logprobs
from worker.sampling.philox import uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.sampling.draw import Draw, TokenLogprobs
    from worker.sampling.likeliest import Flags
    from worker.sampling.logit_rows import LogitRows
    from worker.sampling.scan import Doubles, Floats, Ints

LARGE_SHARE: Final = 0.5
"""From which ``top_p`` on tokens are drawn from all until one is within it."""


class Batch:
    """Draws that are made at once. Those without adjustments use the model's rows, the others have one each behind."""

    def __init__(self, draws: Sequence[Draw], vocabulary: int) -> None:
        self.draws = draws
        self.rows, self.places = distinct_rows([draw.row for draw in draws])
        """The numbers of the rows of logits, and which of them each draw has."""
        self.changed = [index for index, draw in enumerate(draws) if adjusts(draw)]
        """The draws with adjustments."""
        self.used = self.places.copy()
        """The row that each draw is from."""
        self.used[self.changed] = range(len(self.rows), len(self.rows) + len(self.changed))
        self._greedy = [index for index, draw in enumerate(draws) if draw.params.greedy]
        random = [index for index, draw in enumerate(draws) if not draw.params.greedy]
        self._random = _Random(draws, random, self.used, vocabulary) if random else None
        self._told = [index for index, draw in enumerate(draws) if draw.logprobs is not None]
        told = _keys(self.places[self._told], np.ones(len(self._told), dtype=np.float32))
        self._wanted = np.unique(told if self._random is None else np.concatenate([self._random.keys, told]))
        self._told_slots = np.searchsorted(self._wanted, told)

    def wanted(self, first: int, past: int) -> Wanted:
        """Rows whose weights have to be summed, of those from ``first`` on and before ``past``."""
        rows = self._wanted >> 32
        some = (first <= rows) & (rows < past)
        return Wanted(rows[some], self._wanted[some].astype(np.uint32).view(np.float32))

    def tokens(self, rows: LogitRows, possible: Flags) -> list[int]:
        """A token for each draw; any where there is none that is possible."""
        tokens = np.zeros(len(self.draws), dtype=np.int64)
        if self._greedy:
            some = np.array(self._greedy)[possible[self._greedy]]
            tokens[some] = choose.likeliest(rows, self.used[some])
        if self._random is not None:
            index = self._random.index
            tokens[index] = self._random.tokens(rows, possible[index], self._wanted)
        found: list[int] = tokens.tolist()
        return found

    def logprobs(self, rows: LogitRows, possible: Flags, tokens: Sequence[int]) -> list[TokenLogprobs | None]:
        """Of each draw's token, where it is wanted and there is one."""
        result: list[TokenLogprobs | None] = [None] * len(self.draws)
        told = [(index, slot) for index, slot in zip(self._told, self._told_slots, strict=True) if possible[index]]
        if told:
            some, slots = [index for index, _ in told], np.array([slot for _, slot in told])
            ids, tops = [tokens[index] for index in some], [self.draws[index].logprobs or 0 for index in some]
            for index, one in zip(some, token_logprobs(rows, self.places[some], slots, ids, tops), strict=True):
                result[index] = one
        return result


class _Random:
    """Those draws of a batch that aren't greedy. Arrays are ``[draws]``, of these alone."""

    def __init__(self, draws: Sequence[Draw], index: Sequence[int], used: Ints, vocabulary: int) -> None:
        self.index = np.array(index)
        """Which ones they are."""
        self._draws = [draws[place] for place in index]
        self._used = used[self.index]
        params = [draw.params for draw in self._draws]
        degrees, top_p, min_p = np.array([(each.temperature, each.top_p, each.min_p) for each in params]).T
        self._degrees: Floats = np.minimum(degrees, MOST).astype(np.float32)
        """Temperatures, as float32 can hold them."""
        top_k = np.array([each.top_k if each.top_k < vocabulary else 0 for each in params], dtype=np.int64)
        self._top_k, self._top_p, self._min_p = top_k, top_p, min_p
        self._whole = (top_k == 0) & (top_p == 1) & (min_p == 0)
        self._nucleus = (top_k == 0) & (top_p >= LARGE_SHARE) & (top_p < 1)
        self._keys = _keys(self._used, self._degrees)
        self.keys = self._keys[(top_k == 0) & ((top_p < 1) | (min_p == 0))]
        """Of the rows, with temperatures, whose weights have to be summed."""
        self._slots = np.empty(0, dtype=np.int64)

    def tokens(self, rows: LogitRows, possible: Flags, summed: Ints) -> Ints:
        """A token for each; 0 where none is possible. ``summed`` are the keys of all sums there are."""
        tokens = np.zeros(len(self._draws), dtype=np.int64)
        self._slots = np.searchsorted(summed, self._keys)
        numbers = uniforms(
            [draw.params.seed for draw in self._draws],
            [draw.choice for draw in self._draws],
            [draw.position for draw in self._draws],
            choose.TRIES + 1 if self._nucleus.any() else 1,
        )
        for kind, chosen_from in (
            (self._whole, self._from_all),
            (self._nucleus, self._from_nucleus),
            (~self._whole & ~self._nucleus, self._from_likeliest),
        ):
            some = np.flatnonzero(possible & kind)
            if len(some):
                tokens[some] = chosen_from(rows, some, numbers[:, some])
        return tokens

    def _from_all(self, rows: LogitRows, some: Ints, numbers: Doubles) -> Ints:
        slots = self._slots[some]
        return choose.from_all(rows, self._used[some], rows.sum_scales.of(slots), numbers[0], rows.masses(slots))

    def _from_nucleus(self, rows: LogitRows, some: Ints, numbers: Doubles) -> Ints:
        scales, masses = rows.sum_scales.of(self._slots[some]), rows.masses(self._slots[some])
        return choose.from_nucleus(rows, self._used[some], scales, numbers, masses, self._restriction(some))

    def _from_likeliest(self, rows: LogitRows, some: Ints, numbers: Doubles) -> Ints:
        scales = rows.scales(self._used[some], self._degrees[some])
        return choose.from_likeliest(rows, self._used[some], scales, numbers[0], self._restriction(some))

    def _restriction(self, some: Ints) -> choose.Restriction:
        return choose.Restriction(self._top_k[some], self._top_p[some], self._min_p[some], self._slots[some])


def distinct_rows(numbers: Sequence[int]) -> tuple[list[int], Ints]:
    """The numbers, each once, rising; and where each is among them."""
    distinct = sorted(set(numbers))
    places = {number: place for place, number in enumerate(distinct)}
    return distinct, np.array([places[number] for number in numbers], dtype=np.int64)


def _keys(rows: Ints, temperatures: Floats) -> Ints:
    """Numbers that rise with the row, each for one row and temperature."""
    return rows << 32 | temperatures.view(np.uint32)
