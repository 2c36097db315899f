"""Log-probabilities by the model's own logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from worker.sampling.draw import TokenLogprobs
from worker.sampling.likeliest import BOTTOM, edges_by_count, settle
from worker.sampling.scan import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.sampling.likeliest import Flags, Likeliest
    from worker.sampling.logit_rows import LogitRows
    from worker.sampling.scan import Floats, Ints

    Pairs = tuple[tuple[int, float], ...]


def token_logprobs(
    rows: LogitRows, wanted: Ints, slots: Ints, token_ids: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs]:
    """Of one token in each of the rows ``wanted``, beside so many of the likeliest as ``tops`` says.

    ``slots`` says which of the sums are theirs, at temperature 1. Tokens that can't be chosen are never among the
    likeliest, so these may be fewer than was asked for.
    """
    ids, each = np.array(token_ids, dtype=np.int64), np.arange(len(wanted))
    totals = rows.masses(slots).sum(axis=1)
    highest, entropies = rows.highest[wanted].astype(np.float64), np.log(totals / rows.unit)

    def logprobs(logits: Floats, owners: Ints) -> list[float]:
        found: list[float] = (logits - highest[owners] - entropies[owners]).astype(np.float32).tolist()
        return found

    own = logprobs(rows.block(wanted, ids // BLOCK)[each, ids % BLOCK], each)
    likeliest = _likeliest(rows, wanted, np.array(tops, dtype=np.int64), logprobs)
    return [TokenLogprobs(*told) for told in zip(token_ids, own, likeliest, strict=True)]


def _likeliest(
    rows: LogitRows, wanted: Ints, tops: Ints, logprobs: Callable[[Floats, Ints], list[float]]
) -> list[Pairs]:
    result: list[Pairs] = [()] * len(wanted)
    asked = np.flatnonzero(tops)

    def use(found: Likeliest, tried: Ints) -> Flags:
        which = asked[tried]
        starts, ends = found.starts, np.minimum(found.ends, found.starts + tops[which])
        pairs = list(zip(found.ids.tolist(), logprobs(found.logits, which[found.owners]), strict=True))
        for index, start, end in zip(which.tolist(), starts.tolist(), ends.tolist(), strict=True):
            result[index] = tuple(pairs[start:end])
        enough: Flags = (found.edges == BOTTOM) | (ends - starts == tops[which])
        return enough

    if len(asked):
        settle(rows, wanted[asked], edges_by_count(rows, wanted[asked], tops[asked]), use)
    return result
