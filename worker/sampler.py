"""Choosing the next token of every sequence in one go.

A row's token depends on its logits, its parameters and its random number, and on nothing else: not on the other rows,
nor on how many there are, nor on the order in which a device adds numbers up. Two things see to that:

- randomness is a function of (seed, choice, position), computed by Philox4x32-10, a counter-based generator;
- probabilities are rounded down to multiples of 2^-40 before they are added up. Sums of such numbers are exact in
  float64, so a cumulative distribution is the same whichever way it is computed, and what has no probability gets none.

Ties are broken by the lower token id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker.params import SamplingParams

RESOLUTION: Final = 2.0**40
"""Probabilities are counted in units of 1 / RESOLUTION."""

BLOCK: Final = 128
"""Tokens per block in the two-level search through a whole vocabulary."""

WIDTHS: Final = (128, 2048)
"""How many of the likeliest tokens are looked at for top-k and top-p before a whole vocabulary is sorted."""

GROUP: Final = 16
"""Rows that are drawn at once. More would need large buffers, whose fresh pages cost more than they save."""


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], choices: Sequence[int]
) -> list[int | None]:
    """Choose a token for every row of ``logits``, float32 ``[rows, vocabulary]`` on any device; only reads them.

    ``positions`` are the tokens' indices among their sequences' outputs. A row is None when its logits hold a NaN or
    +inf, or nothing but -inf. A token with logit -inf is never chosen.
    """
    tokens: list[int | None] = [None] * len(params)
    greedy = [row for row, wanted in enumerate(params) if wanted.greedy]
    if greedy:
        # A NaN wins over every number, and the first of several equals over the others.
        highest, likeliest = _rows(logits, greedy).max(dim=-1)
        _put(tokens, greedy, likeliest, highest)
    drawn = [row for row, wanted in enumerate(params) if not wanted.greedy]
    for start in range(0, len(drawn), GROUP):
        group = drawn[start : start + GROUP]
        own = [params[row] for row in group]
        uniform = uniforms([p.seed for p in own], [choices[row] for row in group], [positions[row] for row in group])
        wanted_logits = _rows(logits, group)
        highest = wanted_logits.amax(dim=-1)
        chosen = _draw(wanted_logits, highest, own, torch.from_numpy(uniform).to(logits.device))
        _put(tokens, group, chosen, highest)
    return tokens


def _rows(matrix: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows of a matrix, in rising order; without a copy if there is none between them that isn't wanted."""
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows):
        return matrix[first : last + 1]
    return matrix[torch.tensor(rows, device=matrix.device)]


def _put(tokens: list[int | None], rows: Sequence[int], chosen: torch.Tensor, highest: torch.Tensor) -> None:
    for row, token, finite in zip(rows, chosen.tolist(), torch.isfinite(highest).tolist(), strict=True):
        if finite:
            tokens[row] = token


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a multiple of 2^-53, from Philox4x32-10 with the seed as its key."""
    key, choice, position = (np.array(column, dtype=np.uint64) for column in (seeds, choices, positions))
    zero = np.zeros_like(key)
    high, low, *_ = philox((_low(position), _high(position), _low(choice), zero), (_low(key), _high(key)))
    return ((high << np.uint64(32) | low) >> np.uint64(11)).astype(np.float64) * 2.0**-53


Words = tuple["npt.NDArray[np.uint64]", ...]
"""Columns of 32-bit words, kept in 64 bits so that a product loses nothing."""


def philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) over columns of words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = _high(product1) ^ c1 ^ k0, _low(product1), _high(product0) ^ c3 ^ k1, _low(product0)
        k0, k1 = _low(k0 + np.uint64(0x9E3779B9)), _low(k1 + np.uint64(0xBB67AE85))
    return c0, c1, c2, c3


def _low(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return words & np.uint64(0xFFFFFFFF)


def _high(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return words >> np.uint64(32)


def _draw(
    logits: torch.Tensor, highest: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor
) -> torch.Tensor:
    """Token ids int64 ``[rows]`` drawn from ``logits`` ``[rows, vocabulary]``, of which ``highest`` are the maxima."""
    vocabulary = logits.shape[-1]
    weights = _weights(logits, highest, [p.temperature for p in params])
    restricted = [row for row, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocabulary]
    if not restricted:
        return _draw_from_all(weights, uniform)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    tokens[restricted] = _draw_from_likeliest(
        _rows(logits, restricted), _rows(weights, restricted), [params[row] for row in restricted], uniform[restricted]
    )
    whole = sorted({*range(len(params))} - {*restricted})
    if whole:
        tokens[whole] = _draw_from_all(_rows(weights, whole), uniform[whole])
    return tokens


def _weights(logits: torch.Tensor, highest: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Probabilities at the rows' temperatures, in whole units of 1 / RESOLUTION, float32 ``[rows, vocabulary]``."""
    if any(temperature != 1 for temperature in temperatures):
        divisors = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
        # The highest goes to 0 first, so that no temperature makes anything overflow upwards. This changes no bit of
        # a row with temperature 1: softmax subtracts the highest anyway.
        logits = (logits - highest[:, None]).div_(divisors[:, None])
    return torch.softmax(logits, dim=-1).mul_(RESOLUTION).floor_()


def _draw_from_all(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution over all tokens, in order of their ids: first the block, then the token."""
    rows, vocabulary = weights.shape
    if vocabulary % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    up_to = blocks.double().sum(dim=-1).cumsum(dim=-1)
    target = uniform[:, None] * up_to[:, -1:]
    block = _first_above(up_to, target)
    before = torch.nn.functional.pad(up_to, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(dim=-1)
    return (block * BLOCK + _first_above(inside + before, target))[:, 0]


def _draw_from_likeliest(
    logits: torch.Tensor,
    weights: torch.Tensor,
    params: Sequence[SamplingParams],
    uniform: torch.Tensor,
    beyond: int = 0,
) -> torch.Tensor:
    """Invert the cumulative distributions over what top-k and top-p leave, in order of likelihood.

    Looks at as few of the likeliest tokens as will do, but more than ``beyond``. A row is settled when even the last
    token that it keeps is likelier than the last one looked at: then no tie reaches across the edge, and a wider look
    would give the same. So what the neighbours need has no influence on it.
    """
    vocabulary = logits.shape[-1]
    # Every top-k cut must be inside what is looked at, for the mass that it leaves is what top-p is a share of.
    beyond = max(beyond, *(p.top_k for p in params if p.top_k < vocabulary), 0)
    width = next((width for width in WIDTHS if beyond < width < vocabulary), vocabulary)
    values, ids = _likeliest(logits, width)
    kept = _keep(weights, ids, params)
    up_to = kept.cumsum(dim=-1)
    tokens = ids.gather(1, _first_above(up_to, uniform[:, None] * up_to[:, -1:]))[:, 0]
    if width < vocabulary:
        last = (kept > 0).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
        unsettled = (values.gather(1, last)[:, 0] <= values[:, -1]).nonzero()[:, 0].tolist()
        if unsettled:
            own = [params[row] for row in unsettled]
            tokens[unsettled] = _draw_from_likeliest(
                _rows(logits, unsettled), _rows(weights, unsettled), own, uniform[unsettled], width
            )
    return tokens


def _likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest ``width`` logits of each row and their token ids, highest first, lower id first among equals."""
    if width == logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(width, dim=-1)  # in no particular order among equals
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _keep(weights: torch.Tensor, ids: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Weights of the tokens that top-k and then top-p leave, 0 for the others; float64 ``[rows, width]``.

    ``weights`` are the vocabulary's, ``ids`` the likeliest tokens in falling order. Top-p keeps the smallest number of
    tokens that have at least its share of the mass that top-k left.
    """
    device, vocabulary, width = weights.device, weights.shape[-1], ids.shape[-1]
    cuts = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    top_k = torch.tensor(cuts, device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    kept = weights.gather(1, ids).double().masked_fill_(torch.arange(width, device=device) >= top_k, 0.0)
    mass = kept.sum(dim=-1, keepdim=True)
    if max(cuts) > width:
        mass = torch.where(top_k > width, weights.double().sum(dim=-1, keepdim=True), mass)
    before = kept.cumsum(dim=-1) - kept
    return kept.masked_fill_(before >= top_p * mass, 0.0)


def _first_above(up_to: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index of the first running total above the target, ``[rows, 1]``.

    There is one: a random number is at most 1 - 2^-53, and so its share of the last total, even rounded, is below it.
    What has no weight doesn't raise the total and is never first. Where the totals are NaN, the index is 0.
    """
    return (up_to <= target).sum(dim=-1, keepdim=True)
