"""What requests change about logits: bias, bans, penalties, and the counts behind them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker.sampling import (
    GREEDY,
    VOCAB,
    alone,
    chi_square_fits,
    each_row,
    many,
    random_logits,
    tokens_of,
)
from worker.params import SamplingParams
from worker.sampling.adjust import adjust
from worker.sampling.draw import NOTHING_LEFT, Draw
from worker.sampling.penalties import TokenCounts

MOST = torch.finfo(torch.float32).max

if TYPE_CHECKING:
    from worker.sampling.draw import Sampler


def adjusted(logits: list[float], draw: Draw) -> list[float]:
    row = torch.tensor([logits])
    adjust(row, [draw])
    found: list[float] = row[0].tolist()
    return found


def penalized(logits: list[float], prompt: list[int], output: list[int], **penalties: float) -> list[float]:
    return adjusted(logits, Draw(0, SamplingParams(**penalties), 0, 0, TokenCounts(prompt, output)))


def test_a_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_not() -> None:
    got = penalized([4.0, -4.0, 0.0, 3.0, -3.0], [0, 1, 1], [2, 2], repetition_penalty=2.0)
    assert got == [2.0, -8.0, 0.0, 3.0, -3.0]
    assert penalized([4.0, -4.0, 1.0], [0], [1], repetition_penalty=0.5) == [8.0, -2.0, 1.0]


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    logits, prompt, output = [1.0, 1.0, 1.0, 1.0], [0, 0, 1], [1, 2, 2, 2]
    assert penalized(logits, prompt, output, presence_penalty=0.5) == [1.0, 0.5, 0.5, 1.0]
    assert penalized(logits, prompt, output, frequency_penalty=0.25) == [1.0, 0.75, 0.25, 1.0]
    assert penalized(logits, prompt, output, presence_penalty=-1.0, frequency_penalty=-0.5) == [1.0, 2.5, 3.5, 1.0]


def test_bias_comes_first_then_repetition_then_the_others() -> None:
    params = SamplingParams(
        logit_bias=((0, 3.0), (1, -3.0)), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    draw = Draw(0, params, 0, 0, TokenCounts([0, 1, 2], [0, 0, 3]), frozenset([4]))
    assert adjusted([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], draw) == [1.0, -4.0, 0.5, -0.25, -math.inf, 1.0]


def test_what_is_impossible_stays_so_and_nothing_else_becomes_it() -> None:
    """C10, C16: no infinity comes out of finite numbers, whatever the sizes."""
    params = SamplingParams(logit_bias=((0, 100.0), (1, 1e38), (2, -1e38)), repetition_penalty=1e-9)
    draw = Draw(0, params, 0, 0, TokenCounts([0, 1, 2, 3], [3]))
    assert adjusted([-math.inf, 3e38, -3.4e38, 5.0], draw) == pytest.approx([-math.inf, MOST, -MOST * 1e-9, 5e9])
    params = SamplingParams(presence_penalty=1e308, frequency_penalty=1e308, repetition_penalty=100.0)
    draw = Draw(0, params, 0, 0, TokenCounts([0], [1] * 20))
    assert adjusted([-3e38, 1.0, 2.0], draw) == [-MOST, -MOST, 2.0]


@pytest.mark.parametrize("penalty", [1e-9, 0.01, 1.0, 2.0, 100.0])
def test_a_repetition_penalty_of_any_size_beside_plain_requests(sampler: Sampler, penalty: float) -> None:
    """C16: it takes effect for its own row, and nothing else changes."""
    logits = random_logits(3, seed=21)
    plain = tokens_of(sampler, logits, each_row([SamplingParams(seed=row) for row in range(3)]))
    best = int(logits[1].argmax())
    draws = each_row([SamplingParams(seed=row) for row in range(3)])
    draws[1] = Draw(1, replace(GREEDY, repetition_penalty=penalty), 0, 1, TokenCounts([best], [best]))
    got = tokens_of(sampler, logits, draws)
    assert (got[0], got[2]) == (plain[0], plain[2])
    assert (got[1] == best) == (penalty <= 1.0)


def test_greedy_is_by_the_changed_logits(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[[10, 20, 30]] = torch.tensor([3.0, 2.0, 1.0])
    row = logits[None]
    assert alone(sampler, logits, replace(GREEDY, logit_bias=((30, 2.5),))) == 30
    assert tokens_of(sampler, row, [Draw(0, GREEDY, 0, 0, banned=frozenset([10, 20]))]) == [30]
    frequent = TokenCounts([], [10, 10, 20])
    assert tokens_of(sampler, row, [Draw(0, replace(GREEDY, frequency_penalty=0.9), 0, 0, frequent)]) == [10]
    assert tokens_of(sampler, row, [Draw(0, replace(GREEDY, frequency_penalty=1.2), 0, 0, frequent)]) == [30]
    assert tokens_of(sampler, row, [Draw(0, replace(GREEDY, top_k=1, presence_penalty=5.0), 0, 0, frequent)]) == [30]


def test_the_distribution_is_that_of_the_changed_logits(sampler: Sampler) -> None:
    logits = random_logits(1, 200, seed=22, scale=1.0)[0]
    bias = tuple((token, 1.0) for token in range(0, 200, 3))
    expected = logits.double()
    expected[::3] += 1.0
    assert chi_square_fits(
        many(sampler, logits, SamplingParams(logit_bias=bias, seed=1), 5000), torch.softmax(expected, -1)
    )


def test_a_cold_temperature_with_most_tokens_biased_away(sampler: Sampler) -> None:
    """C10: a valid token with a finite log-probability."""
    logits = random_logits(1, seed=23)
    bias = tuple((token, -100.0) for token in range(VOCAB) if token not in (5, 6))
    for seed in range(10):
        draw = Draw(0, SamplingParams(temperature=0.01, logit_bias=bias, seed=seed), 0, 0, logprobs=0)
        (drawn,) = sampler.draw(logits, [draw])
        assert drawn.token_id == 5 + int(logits[0, 6] > logits[0, 5])
        assert drawn.logprobs is not None
        assert math.isfinite(drawn.logprobs.logprob)


def test_when_all_that_is_possible_is_banned_there_is_a_clear_error(sampler: Sampler) -> None:
    logits = random_logits(3, seed=24)
    logits[1, 2:] = -math.inf
    draws = each_row([SamplingParams(), SamplingParams(), GREEDY])
    expected = tokens_of(sampler, logits, draws)
    draws[1] = replace(draws[1], banned=frozenset([0, 1]), logprobs=1)
    got = sampler.draw(logits, draws)
    assert [drawn.token_id for drawn in got] == [expected[0], None, expected[2]]
    assert (got[1].error, got[1].logprobs, got[1].finite) == (NOTHING_LEFT, None, True)
    draws[1] = replace(draws[1], banned=frozenset([1]))
    assert tokens_of(sampler, logits, draws) == [expected[0], 0, expected[2]]


def test_a_ban_on_an_id_beyond_the_vocabulary_touches_nobody(sampler: Sampler) -> None:
    """An end token that the model names and its vocabulary does not have."""
    logits = random_logits(2, 100, seed=25)
    expected = tokens_of(sampler, logits, each_row([GREEDY] * 2))
    draws = [
        replace(draw, banned=frozenset([100, 128 + int(logits[1].argmax()), 2**31])) for draw in each_row([GREEDY] * 2)
    ]
    assert tokens_of(sampler, logits, draws) == expected


def test_biases_are_those_of_each_request() -> None:
    rows = torch.zeros(3, 4)
    params = [SamplingParams(logit_bias=pairs) for pairs in (((1, 1.0), (3, -2.0)), (), ((1, 3.0),))]
    for times in (1, 2):
        adjust(rows, [Draw(row, each, 0, 0) for row, each in enumerate(params)])
        expected = [[0.0, 1.0, 0.0, -2.0], [0.0] * 4, [0.0, 3.0, 0.0, 0.0]]
        assert rows.tolist() == [[times * value for value in row] for row in expected]


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_counts_are_those_of_the_output(prompt: list[int], output: list[int], later: list[int]) -> None:
    counts = TokenCounts(prompt, output)
    for token in later:
        counts.add(token)
    expected = {**dict.fromkeys(prompt, 0), **Counter([*output, *later])}
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected
    assert len(counts.ids) == len(expected)
