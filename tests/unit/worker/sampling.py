"""What the sampler's tests share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.unit.worker.kernels.native import NATIVE, TEAMS
from worker.params import SamplingParams
from worker.sampling.draw import Draw
from worker.sampling.native import NativeSampler
from worker.sampling.sampler import TorchSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.sampling.draw import Sampler

VOCAB = 1000  # no multiple of the sampler's block
GREEDY = SamplingParams(temperature=0.0)
SAMPLERS: dict[str, Sampler] = {
    "torch": TorchSampler(),
    **{level: NativeSampler(native) for level, native in NATIVE.items()},
    **{f"{level}, 3 threads": NativeSampler(native) for level, native in [*TEAMS.items()][:1]},
}
"""Torch's, and one with every build of the native kernels that runs here. One for all tests each: what is left in its
buffers must not matter."""


def random_logits(rows: int, vocabulary: int = VOCAB, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def tokens_of(sampler: Sampler, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    return [drawn.token_id for drawn in sampler.draw(logits, draws)]


def each_row(params: Sequence[SamplingParams], positions: Sequence[int] | None = None, choice: int = 0) -> list[Draw]:
    """One draw from each row; positions as the rows' numbers unless they are given."""
    places = range(len(params)) if positions is None else positions
    return [Draw(row, own, choice, place) for row, (own, place) in enumerate(zip(params, places, strict=True))]


def alone(
    sampler: Sampler, logits: torch.Tensor, params: SamplingParams, position: int = 0, choice: int = 0
) -> int | None:
    (token,) = tokens_of(sampler, logits[None], [Draw(0, params, choice, position)])
    return token


def many(sampler: Sampler, logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """Tokens of ``count`` successive positions over the same logits."""
    tokens = tokens_of(sampler, logits[None], [Draw(0, params, 0, position) for position in range(count)])
    found = [token for token in tokens if token is not None]
    assert len(found) == count
    return found


def chi_square_fits(tokens: Sequence[int], probabilities: torch.Tensor) -> bool:
    """Whether counts are within 4 standard deviations of what is expected, tokens expected under 5 times in one bin."""
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    expected = probabilities.double().numpy() * len(tokens)
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = [*counts[~rare], counts[rare].sum()] if rare.any() else [*counts]
    wanted = [*expected[~rare], expected[rare].sum()] if rare.any() else [*expected]
    pairs = [(o, w) for o, w in zip(observed, wanted, strict=True) if w > 0]
    statistic = sum((o - w) ** 2 / w for o, w in pairs)
    freedom = len(pairs) - 1
    return bool(statistic <= freedom + 4 * math.sqrt(2 * freedom))


KINDS = (
    SamplingParams(),
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=40),
    SamplingParams(temperature=0.9, top_p=0.95, top_k=700),
    SamplingParams(temperature=2.0),
    SamplingParams(top_p=0.9999),
    SamplingParams(top_k=1),
    SamplingParams(temperature=4.0, top_p=0.99),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, min_p=0.001, top_p=0.97),
    SamplingParams(temperature=0.8, logit_bias=((3, 4.0), (70, -2.0), (999, 1.5))),
    SamplingParams(temperature=0.0, logit_bias=((17, 30.0),)),
)
"""Every way through the sampler."""


def mixed_params(rows: int) -> list[SamplingParams]:
    return [replace(KINDS[row % len(KINDS)], seed=row) for row in range(rows)]
