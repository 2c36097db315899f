"""The sampler beside a slow one in float64 that does what ``worker.params`` says, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.worker.sampling import SAMPLERS
from worker.params import SamplingParams
from worker.sampling.batch import LARGE_SHARE
from worker.sampling.choose import TRIES
from worker.sampling.draw import NON_FINITE, NOTHING_LEFT, Draw
from worker.sampling.penalties import TokenCounts
from worker.sampling.philox import uniforms

if TYPE_CHECKING:
    import numpy.typing as npt

    Doubles = npt.NDArray[np.float64]

NEAR = 1e-6
"""Shares, and random numbers, that lie this near to an edge may fall on either side of it."""


def adjusted(logits: npt.NDArray[np.float32], draw: Draw) -> Doubles:
    """With bias, penalties, bans and all that isn't allowed, as float32 holds it."""
    row = logits.astype(np.float64)
    for token, bias in draw.params.logit_bias:
        row[token] = np.float32(row[token] + bias)
    if draw.params.penalizes:
        assert draw.counts is not None
        for token, count in zip(draw.counts.ids.tolist(), draw.counts.counts.tolist(), strict=True):
            penalty = draw.params.repetition_penalty
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
            if count > 0:
                row[token] -= draw.params.presence_penalty + count * draw.params.frequency_penalty
            row[token] = np.float32(row[token])
    row[list(draw.banned)] = -np.inf
    if draw.allowed is not None:
        tokens = np.arange(len(row))
        row[draw.allowed[tokens // 32] >> (tokens % 32) & 1 == 0] = -np.inf
    return row


def kept_tokens(row: Doubles, params: SamplingParams, nudge: float) -> list[int]:
    """What the parameters leave, likeliest first, with all shares off by so much."""
    kept = sorted(range(len(row)), key=lambda token: (-row[token], token))
    share = np.exp((row - row.max()) / params.temperature)
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        running = np.cumsum(share[kept])
        kept = kept[: int(np.searchsorted(running, (params.top_p + nudge) * running[-1])) + 1]
    return [token for token in kept if share[token] >= min(params.min_p * (1 + nudge), 1.0)]


def drawn_tokens(row: Doubles, params: SamplingParams, tokens: list[int], uniform: float) -> set[int]:
    """The token at which the cumulative distribution over these passes the random number, or both near an edge."""
    share = np.exp((row[tokens] - row.max()) / params.temperature)
    running = np.cumsum(share)
    first, last = np.searchsorted(running, np.array([uniform - NEAR, uniform + NEAR]) * running[-1], side="right")
    return {tokens[place] for place in range(first, min(last + 1, len(tokens))) if share[place] > 0}


def possible_tokens(row: Doubles, draw: Draw) -> set[int]:
    """The tokens that may be drawn: one, or a few where edges are too near to tell."""
    params = draw.params
    if params.temperature < 1e-5 or params.top_k == 1:
        return {int(row.argmax())}
    numbers = uniforms([params.seed], [draw.choice], [draw.position], TRIES + 1)[:, 0].tolist()
    everything = list(range(len(row)))
    some_k = 0 < params.top_k < len(row)
    if not some_k and params.top_p == 1 and params.min_p == 0:
        return drawn_tokens(row, params, everything, numbers[0])
    more, less = (kept_tokens(row, params, nudge) for nudge in (NEAR, -NEAR))
    found: set[int] = set()
    last = numbers[0]
    if not some_k and LARGE_SHARE <= params.top_p < 1:
        for number in numbers[:-1]:
            tokens = drawn_tokens(row, params, everything, number)
            found |= tokens & {*more, *less}
            if tokens <= {*more} & {*less}:
                return found
        last = numbers[-1]
    return found | drawn_tokens(row, params, more, last) | drawn_tokens(row, params, less, last)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """Of many shapes, with ties and with tokens that are impossible."""
    vocabulary = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 200, 1000, 3000]))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 100.0]))
    row = numbers.standard_normal(vocabulary) * scale + draw(st.sampled_from([0.0, -30.0, 90.0, -1000.0]))
    if draw(st.booleans()):
        row = np.round(row * 4) / 4
    impossible = numbers.random(vocabulary) < draw(st.sampled_from([0.0, 0.0, 0.5, 0.99]))
    row[impossible] = -np.inf
    row[numbers.integers(vocabulary)] = scale
    return row.astype(np.float32)


maybe = st.booleans()


@st.composite
def params(draw: st.DrawFn, vocabulary: int) -> SamplingParams:
    tokens = st.integers(0, vocabulary - 1)
    bias = draw(st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5)) if draw(maybe) else {}
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 0.7, 1.0, 1.0, 1.5, 10.0, 100.0])),
        top_p=draw(st.one_of(st.just(1.0), st.floats(1e-9, 1.0), st.sampled_from([0.5, 0.9, 0.999999]))),
        top_k=draw(st.one_of(st.just(0), st.integers(0, 60), st.integers(0, 2 * vocabulary))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0, 1), st.sampled_from([1e-12, 0.01, 1.0]))),
        seed=draw(st.integers(0, 2**64 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1e-2, 0.9, 1.1, 2.0, 100.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.5, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.1, 2.0])),
        logit_bias=tuple(bias.items()),
    )


@st.composite
def draws(draw: st.DrawFn, vocabulary: int, row: int) -> Draw:
    own = draw(params(vocabulary))
    tokens = st.lists(st.integers(0, vocabulary - 1), max_size=30)
    counts = TokenCounts(draw(tokens), draw(tokens)) if own.penalizes else None
    banned = frozenset(draw(tokens)) if draw(maybe) else frozenset[int]()
    allowed = None
    if draw(maybe):
        words = draw(st.integers(-(-vocabulary // 32), vocabulary // 32 + 2))  # it may go on beyond the vocabulary
        bits = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 2**32, words, dtype=np.uint32)
        allowed = np.where(bits % 4 == 0, np.uint32(0), np.where(bits % 4 == 1, np.uint32(2**32 - 1), bits))
    return Draw(row, own, draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**40)), counts, banned, None, allowed)


@settings(max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rows_of_logits(), st.data())
@example(np.zeros(2000, dtype=np.float32), None)
def test_it_draws_what_the_reference_draws(row: npt.NDArray[np.float32], data: st.DataObject | None) -> None:
    if data is None:
        several = [Draw(0, SamplingParams(top_k=700, top_p=0.5, min_p=0.1, seed=seed), 0, 0) for seed in range(5)]
    else:
        several = [data.draw(draws(len(row), 0)) for _ in range(5)]
    logits = torch.from_numpy(row)[None]
    drawn = {name: sampler.draw(logits, several) for name, sampler in SAMPLERS.items()}
    for place, draw in enumerate(several):
        own = adjusted(row, draw)
        if own.max() == -np.inf:
            error = NON_FINITE if row.max() == -np.inf else NOTHING_LEFT
            assert {each[place].error for each in drawn.values()} == {error}
            continue
        possible = possible_tokens(own, draw)
        for name, each in drawn.items():
            assert each[place].token_id in possible, (name, draw)
