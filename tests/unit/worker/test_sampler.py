"""Sampling: right distributions, exact rules, and rows that don't know of each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from worker.params import SamplingParams
from worker.philox import philox, uniforms
from worker.sampler import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 1000  # no multiple of the sampler's block
GREEDY = SamplingParams(temperature=0.0)


def random_logits(rows: int, vocabulary: int = VOCAB, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def alone(logits: torch.Tensor, params: SamplingParams, position: int = 0, choice: int = 0) -> int | None:
    (token,) = sample(logits[None], [params], [position], [choice])
    return token


def draws(logits: torch.Tensor, params: SamplingParams, count: int, batch: int = 500) -> list[int]:
    """Tokens of ``count`` successive positions over the same logits."""
    tokens: list[int] = []
    for start in range(0, count, batch):
        got = sample(logits.expand(batch, -1), [params] * batch, range(start, start + batch), [0] * batch)
        tokens += [token for token in got if token is not None]
    assert len(tokens) == count
    return tokens


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


# Randomness


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    columns = philox(*(tuple(np.array([word], dtype=np.uint64) for word in words) for words in (counter, key)))
    assert tuple(int(column[0]) for column in columns) == expected


def test_random_numbers_are_pinned() -> None:
    got = uniforms([0, 1, 2**64 - 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1])
    assert [f"{number:.12f}" for number in got] == [
        "0.399046470849",
        "0.890259172976",
        "0.447822036474",
        "0.516679160749",
        "0.972241201522",
    ]


def test_random_numbers_fill_the_unit_interval_evenly() -> None:
    got = uniforms([7] * 10000, [0] * 10000, range(10000))
    assert ((got >= 0) & (got < 1)).all()
    counts = np.histogram(got, bins=100, range=(0, 1))[0]
    assert chi_square_fits([bin_ for bin_, count in enumerate(counts) for _ in range(count)], torch.full((100,), 0.01))


def test_every_part_of_the_counter_matters() -> None:
    logits = random_logits(1, scale=1.0)[0]
    base = [alone(logits, SamplingParams(seed=1), position) for position in range(20)]
    assert base == [alone(logits, SamplingParams(seed=1), position) for position in range(20)]
    assert base != [alone(logits, SamplingParams(seed=2), position) for position in range(20)]
    assert base != [alone(logits, SamplingParams(seed=1), position, choice=1) for position in range(20)]
    assert base != [alone(logits, SamplingParams(seed=1 + 2**32), position) for position in range(20)]
    assert len(set(base)) > 10


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_works(seed: int) -> None:
    token = alone(random_logits(1)[0], SamplingParams(seed=seed))
    assert token is not None
    assert 0 <= token < VOCAB


# Greedy


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
    ],
)
def test_what_comes_to_greedy_is_greedy(params: SamplingParams) -> None:
    logits = random_logits(20)
    expected = logits.argmax(dim=-1).tolist()
    assert sample(logits, [params] * 20, range(20), [0] * 20) == expected


def test_of_equally_likely_tokens_greedy_takes_the_lowest_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [400, 17, 999]] = 5.0
    logits[1, :] = -1.0
    logits[2, 999] = 1.0
    for params in (GREEDY, SamplingParams(top_k=1), SamplingParams(top_p=1e-9)):
        assert sample(logits, [params] * 3, range(3), [0] * 3) == [17, 0, 999]


# Distributions


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_distribution_is_the_softmax(temperature: float) -> None:
    logits = random_logits(1, 300, seed=1)[0]
    tokens = draws(logits, SamplingParams(temperature=temperature, seed=3), 20000)
    assert chi_square_fits(tokens, torch.softmax(logits.double() / temperature, -1))


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = random_logits(1, 300, seed=2, scale=1.0)[0]
    expected = torch.softmax(logits.double(), -1)
    kept = expected.sort(descending=True).indices[:20]
    expected = torch.zeros_like(expected).index_copy(0, kept, expected[kept] / expected[kept].sum())
    assert chi_square_fits(draws(logits, SamplingParams(top_k=20, seed=4), 10000), expected)


def test_top_p_keeps_the_fewest_tokens_that_have_its_share() -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.69, 2), (0.8, 3), (0.9, 4), (0.96, 5), (1.0, 5)):
        tokens = draws(logits, SamplingParams(top_p=top_p, seed=5), 2000)
        share = torch.softmax(logits.double(), -1)
        share[kept:] = 0
        assert set(tokens) == set(range(kept)), top_p
        assert chi_square_fits(tokens, share / share.sum())


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = torch.tensor([0.3, 0.3, 0.2, 0.2]).log()
    assert set(draws(logits, SamplingParams(top_p=0.45, top_k=2, seed=6), 500)) == {0}
    assert set(draws(logits, SamplingParams(top_p=0.45, seed=6), 500)) == {0, 1}


def test_top_p_is_a_share_of_what_a_wide_top_k_left() -> None:
    logits = -torch.arange(VOCAB) / 10000
    tokens = draws(logits, SamplingParams(top_p=0.1, top_k=200, seed=6), 1000)
    assert set(tokens) == set(range(20))


@pytest.mark.parametrize("params", [SamplingParams(top_k=300), SamplingParams(top_k=10**20), SamplingParams(top_k=301)])
def test_a_top_k_of_the_whole_vocabulary_or_more_changes_nothing(params: SamplingParams) -> None:
    logits = random_logits(1, 300)[0]
    plain = draws(logits, SamplingParams(seed=params.seed), 500)
    assert draws(logits, params, 500) == plain


def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids() -> None:
    logits = torch.zeros(VOCAB)
    logits[500:] = 1.0
    assert set(draws(logits, SamplingParams(top_k=10, seed=8), 1000)) == set(range(500, 510))
    assert {token for token in draws(logits, SamplingParams(top_k=505, seed=8), 3000) if token < 500} == set(range(5))


def test_a_flat_distribution_over_many_tokens_is_cut_exactly() -> None:
    """More tokens pass than the sampler looks at first, or second."""
    logits = torch.zeros(5000)
    tokens = draws(logits, SamplingParams(top_p=0.5, seed=9), 1500, batch=50)
    assert 2480 < max(tokens) < 2500
    assert chi_square_fits([token // 100 for token in tokens], torch.full((25,), 0.04))


def test_a_token_of_no_probability_is_never_chosen() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[3, 500, 997]] = torch.tensor([1.0, 2.0, 0.0])
    for params in (
        SamplingParams(temperature=100.0),
        SamplingParams(temperature=0.01),
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.999999),
        SamplingParams(top_k=2, top_p=0.99),
        GREEDY,
    ):
        assert set(draws(logits, params, 1000)) <= {3, 500, 997}


@pytest.mark.parametrize(("number", "expected"), [(0.0, 300), (1 - 2**-53, 997)])
def test_the_lowest_and_the_highest_random_number_choose_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, number: float, expected: int
) -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[300, 500, 997]] = torch.tensor([1.0, 0.9, 0.8])
    monkeypatch.setattr("worker.sampler.uniforms", lambda *_: np.array([number]))
    for params in (SamplingParams(), SamplingParams(top_k=100), SamplingParams(top_p=0.999999)):
        assert alone(logits, params) == expected


def test_extreme_temperatures_and_logits_are_safe() -> None:
    logits = random_logits(8) * 1e4
    for temperature in (1e-5, 1e-4, 0.01, 100.0):
        params = [SamplingParams(temperature=temperature, seed=row) for row in range(8)]
        got = sample(logits, params, range(8), [0] * 8)
        assert got == logits.argmax(dim=-1).tolist()
    huge = torch.tensor([[-3e38, 3e38, 0.0], [-3.1e38, -3.2e38, -3e38]])
    assert sample(huge, [SamplingParams(temperature=0.01)] * 2, [0, 1], [0, 0]) == [1, 2]


# Rows


def mixed_params(rows: int) -> list[SamplingParams]:
    kinds = [
        SamplingParams(),
        GREEDY,
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=40),
        SamplingParams(temperature=0.9, top_p=0.95, top_k=700),
        SamplingParams(temperature=2.0),
        SamplingParams(top_p=0.9999),
        SamplingParams(top_k=1),
        SamplingParams(temperature=4.0, top_p=0.99),
    ]
    return [
        SamplingParams(kind.temperature, kind.top_p, kind.top_k, seed=row)
        for row in range(rows)
        for kind in [kinds[row % len(kinds)]]
    ]


@pytest.mark.parametrize("vocabulary", [VOCAB, 4096, 49152])
@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])
def test_a_rows_token_does_not_depend_on_the_other_rows(vocabulary: int, rounded: bool) -> None:
    rows = 33
    logits = random_logits(rows, vocabulary, seed=11)
    if rounded:  # what a bfloat16 model gives: many ties
        logits = logits.bfloat16().float()
    params, positions, choices = mixed_params(rows), [row * 3 for row in range(rows)], [row % 3 for row in range(rows)]

    def some(order: Sequence[int]) -> list[int | None]:
        return sample(
            logits[list(order)], [params[r] for r in order], [positions[r] for r in order], [choices[r] for r in order]
        )

    solo = [some([row])[0] for row in range(rows)]
    sizes = range(1, rows + 1) if vocabulary == VOCAB else (2, 7, 32, 33)
    for size in sizes:
        assert some(range(size)) == solo[:size]
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(12)).tolist()
    assert some(shuffled) == [solo[row] for row in shuffled]
    drawn_only = [row for row in range(rows) if not params[row].greedy]
    assert some(drawn_only) == [solo[row] for row in drawn_only]


def test_a_rows_token_does_not_depend_on_the_others_parameters() -> None:
    logits = random_logits(6, seed=13)
    for mine in mixed_params(9):
        expected = alone(logits[0], mine, 5)
        for theirs in mixed_params(9):
            assert sample(logits, [mine, *[theirs] * 5], [5] * 6, [0] * 6)[0] == expected


def test_a_row_can_be_a_view_into_something_else() -> None:
    logits = random_logits(4)
    spread = torch.zeros(8, VOCAB + 3)
    spread[::2, 3:] = logits
    params = mixed_params(4)
    assert sample(spread[::2, 3:], params, range(4), [0] * 4) == sample(logits, params, range(4), [0] * 4)


def test_the_logits_are_left_alone() -> None:
    logits = random_logits(9)
    before = logits.clone()
    sample(logits, mixed_params(9), range(9), [0] * 9)
    assert torch.equal(logits, before)


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB), [], [], []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 500, VOCAB - 1])
def test_a_row_with_a_value_that_is_no_number_is_flagged_alone(bad: float, where: int) -> None:
    logits = random_logits(18)
    params = mixed_params(18)
    expected = sample(logits, params, range(18), [0] * 18)
    for row in range(18):
        broken = logits.clone()
        broken[row, where] = bad
        got = sample(broken, params, range(18), [0] * 18)
        assert got == [*expected[:row], None, *expected[row + 1 :]]


def test_rows_without_any_possible_token_are_flagged() -> None:
    logits = random_logits(9)
    params = mixed_params(9)
    for value in (math.nan, math.inf, -math.inf):
        assert sample(torch.full((9, VOCAB), value), params, range(9), [0] * 9) == [None] * 9
    logits[:, ::2] = -math.inf
    assert None not in sample(logits, params, range(9), [0] * 9)


def test_logits_made_in_inference_mode_are_fine() -> None:
    with torch.inference_mode():
        logits = random_logits(9) + 0
    assert sample(logits, mixed_params(9), range(9), [0] * 9) == sample(
        logits.clone(), mixed_params(9), range(9), [0] * 9
    )
