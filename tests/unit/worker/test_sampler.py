"""Sampling from one row: right distributions, exact rules, and nothing that is impossible."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

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
from worker.sampling.choose import TRIES
from worker.sampling.draw import Draw
from worker.sampling.sampler import TorchSampler

if TYPE_CHECKING:
    from worker.sampling.draw import Sampler


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-12),
        SamplingParams(temperature=9e-6, top_p=0.9, top_k=50),
        SamplingParams(temperature=1.5, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=5.0, top_p=1e-4, top_k=7),
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=3.0, min_p=1.0),
    ],
    ids=str,
)
def test_what_comes_to_greedy_is_greedy(sampler: Sampler, params: SamplingParams) -> None:
    """Tiny temperatures and shares neither overflow nor empty the distribution: C01."""
    logits = random_logits(20)
    assert tokens_of(sampler, logits, each_row([params] * 20)) == logits.argmax(dim=-1).tolist()


def test_of_equally_likely_tokens_greedy_takes_the_lowest_id(sampler: Sampler) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [400, 17, 999]] = 5.0
    logits[1, :] = -1.0
    logits[2, 999] = 1.0
    for params in (GREEDY, SamplingParams(top_k=1), SamplingParams(top_p=1e-9)):
        assert tokens_of(sampler, logits, each_row([params] * 3)) == [17, 0, 999]


@pytest.mark.parametrize(
    ("temperature", "highest"), [(0.5, 0.0), (1.0, 0.0), (3.0, 0.0), (1.0, 7.0), (0.5, 200.0), (3.0, -300.0)]
)
def test_the_distribution_is_the_softmax(sampler: Sampler, temperature: float, highest: float) -> None:
    logits = random_logits(1, 300, seed=1)[0]
    logits += highest - logits.max()
    tokens = many(sampler, logits, SamplingParams(temperature=temperature, seed=3), 8000)
    assert chi_square_fits(tokens, torch.softmax(logits.double() / temperature, -1))


def test_top_k_keeps_the_k_likeliest(sampler: Sampler) -> None:
    logits = random_logits(1, 300, seed=2, scale=1.0)[0]
    expected = torch.softmax(logits.double(), -1)
    kept = expected.sort(descending=True).indices[:20]
    expected = torch.zeros_like(expected).index_copy(0, kept, expected[kept] / expected[kept].sum())
    assert chi_square_fits(many(sampler, logits, SamplingParams(top_k=20, seed=4), 10000), expected)


def test_top_p_keeps_the_fewest_tokens_that_have_its_share(sampler: Sampler) -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.69, 2), (0.8, 3), (0.9, 4), (0.96, 5), (1.0, 5)):
        tokens = many(sampler, logits, SamplingParams(top_p=top_p, seed=5), 2000)
        share = torch.softmax(logits.double(), -1)
        share[kept:] = 0
        assert set(tokens) == set(range(kept)), top_p
        assert chi_square_fits(tokens, share / share.sum())


def test_top_p_is_a_share_of_what_top_k_left(sampler: Sampler) -> None:
    logits = torch.tensor([0.3, 0.3, 0.2, 0.2]).log()
    assert set(many(sampler, logits, SamplingParams(top_p=0.45, top_k=2, seed=6), 500)) == {0}
    assert set(many(sampler, logits, SamplingParams(top_p=0.45, seed=6), 500)) == {0, 1}


def test_top_p_is_a_share_of_what_a_wide_top_k_left(sampler: Sampler) -> None:
    logits = -torch.arange(VOCAB) / 10000
    tokens = many(sampler, logits, SamplingParams(top_p=0.1, top_k=200, seed=6), 1000)
    assert set(tokens) == set(range(20))


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(sampler: Sampler) -> None:
    shares = torch.tensor([0.4, 0.21, 0.19, 0.11, 0.06, 0.03])
    for min_p, kept in ((0.0, 6), (0.05, 6), (0.1, 5), (0.2, 4), (0.3, 3), (0.5, 2), (0.6, 1), (1.0, 1)):
        expected = shares.double()
        expected[kept:] = 0
        tokens = many(sampler, shares.log(), SamplingParams(min_p=min_p, seed=7), 3000)
        assert set(tokens) == set(range(kept)), min_p
        assert chi_square_fits(tokens, expected / expected.sum())


def test_min_p_looks_at_the_distribution_that_the_temperature_makes(sampler: Sampler) -> None:
    logits = torch.tensor([0.0, -1.0, -2.0])
    for temperature, kept in ((0.5, 1), (1.0, 2), (2.0, 3)):
        assert set(many(sampler, logits, SamplingParams(temperature, min_p=0.3, seed=7), 500)) == set(range(kept))


def test_a_token_is_left_when_all_three_keep_it(sampler: Sampler) -> None:
    logits = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).log()
    for top_k, top_p, min_p, kept in ((3, 1.0, 0.7, 2), (2, 1.0, 0.5, 2), (4, 0.7, 0.1, 3), (4, 0.9, 0.8, 2)):
        params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, seed=8)
        assert set(many(sampler, logits, params, 500)) == set(range(kept)), params


@pytest.mark.parametrize("top_k", [300, 301, 2**31, 9999999, 10**20])
def test_a_top_k_of_the_whole_vocabulary_or_more_changes_nothing(sampler: Sampler, top_k: int) -> None:
    """C02"""
    logits = random_logits(1, 300)[0]
    plain = many(sampler, logits, SamplingParams(), 500)
    assert many(sampler, logits, SamplingParams(top_k=top_k), 500) == plain


def test_top_k_of_all_sizes_in_one_batch_with_greedy(sampler: Sampler) -> None:
    """C02: each as if it were alone, 1 as greedy, 0 and what is too much as none."""
    logits = random_logits(8)
    sizes = (0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 9999999, 2)
    draws = each_row([*(SamplingParams(top_k=size, seed=5) for size in sizes), GREEDY])
    got = tokens_of(sampler, logits, draws)
    assert got == [tokens_of(sampler, logits, [draw])[0] for draw in draws]
    assert (got[1], got[7]) == (logits[1].argmax(), logits[7].argmax())
    plain = tokens_of(sampler, logits, [replace(draw, params=SamplingParams(seed=5)) for draw in draws])
    assert [got[row] for row in (0, 3, 4, 5)] == [plain[row] for row in (0, 3, 4, 5)]


def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    logits[500:] = 1.0
    assert set(many(sampler, logits, SamplingParams(top_k=10, seed=8), 1000)) == set(range(500, 510))
    assert {token for token in many(sampler, logits, SamplingParams(top_k=505, seed=8), 3000) if token < 500} == set(
        range(5)
    )


def test_zeros_of_both_signs_are_equal(sampler: Sampler) -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[10:20] = torch.tensor([-0.0, 0.0] * 5)
    assert set(many(sampler, logits, SamplingParams(top_k=3, seed=8), 500)) == {10, 11, 12}
    assert alone(sampler, logits, GREEDY) == 10


def test_a_flat_distribution_over_many_tokens_is_cut_exactly(sampler: Sampler) -> None:
    tokens = many(sampler, torch.zeros(5000), SamplingParams(top_p=0.5, seed=9), 1000)
    assert 2480 < max(tokens) < 2500
    assert chi_square_fits([token // 100 for token in tokens], torch.full((25,), 0.04))


def test_a_token_of_no_probability_is_never_chosen(sampler: Sampler) -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[3, 500, 997]] = torch.tensor([1.0, 2.0, 0.0])
    for params in (
        SamplingParams(temperature=100.0),
        SamplingParams(temperature=1e300),
        SamplingParams(temperature=0.01),
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.999999),
        SamplingParams(top_k=2, top_p=0.99),
        SamplingParams(min_p=1e-9),
        SamplingParams(logit_bias=((4, 100.0), (3, 1.0))),
        GREEDY,
    ):
        assert set(many(sampler, logits, params, 1000)) <= {3, 500, 997}


@pytest.mark.parametrize(("number", "expected"), [(0.0, 300), (1 - 2**-53, 997)])
def test_the_lowest_and_the_highest_random_number_choose_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, number: float, expected: int
) -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[300, 500, 997]] = torch.tensor([1.0, 0.9, 0.8])
    monkeypatch.setattr("worker.sampling.batch.uniforms", lambda *_: np.full((TRIES + 1, 1), number))
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=100),
        SamplingParams(top_p=0.999999),
        SamplingParams(top_p=0.499, temperature=2.0) if not number else SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1),
    ):
        assert alone(TorchSampler(), logits, params) == expected


def test_extreme_temperatures_and_logits_are_safe(sampler: Sampler) -> None:
    """C01, C05: neither an overflow nor a NaN, at any value that is let in."""
    logits = random_logits(8) * 1e4
    for temperature in (1e-5, 1e-4, 0.01, 100.0):
        draws = each_row([SamplingParams(temperature=temperature, seed=row) for row in range(8)])
        assert tokens_of(sampler, logits, draws) == logits.argmax(dim=-1).tolist()
    huge = torch.tensor([[-3e38, 3e38, 0.0], [-3.1e38, -3.2e38, -3e38]])
    for params in (SamplingParams(temperature=0.01), SamplingParams(temperature=0.01, min_p=0.5, top_p=0.5)):
        assert tokens_of(sampler, huge, each_row([params] * 2)) == [1, 2]
    for temperature in (1e30, 1e38, 1e300):
        tokens = many(sampler, random_logits(1, 20)[0], SamplingParams(temperature=temperature, seed=1), 5000)
        assert chi_square_fits(tokens, torch.full((20,), 0.05))


def test_a_share_of_next_to_nothing_among_equals(sampler: Sampler) -> None:
    """Two blocks with the same highest logit, and a share that is less than numbers go: still the first of them."""
    logits = torch.full((1, 1000), -5.0)
    logits[0, [70, 500]] = 2.0
    for share in (1e-310, 5e-324, 1e-300, 1e-9):
        for min_p in (0.0, 1.0):
            assert tokens_of(sampler, logits, [Draw(0, SamplingParams(top_p=share, min_p=min_p), 0, 0)]) == [70]
