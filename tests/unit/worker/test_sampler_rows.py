"""Rows that don't know of each other: neither of neighbours nor of threads nor of what broke beside them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.worker.sampling import (
    GREEDY,
    KINDS,
    VOCAB,
    each_row,
    mixed_params,
    random_logits,
    tokens_of,
)
from worker.params import SamplingParams
from worker.sampling.draw import NON_FINITE, Draw, Drawn, Score
from worker.sampling.penalties import TokenCounts
from worker.sampling.sampler import TorchSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.sampling.draw import Sampler


def everything(rows: int, vocabulary: int) -> list[Draw]:
    """A draw of every kind, with log-probabilities for some, penalties and bans for others, or tokens that alone are
    allowed."""
    draws = []
    for row, params in enumerate(mixed_params(rows)):
        if row % 4 == 3:
            params = replace(params, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)
        counts = TokenCounts(range(row, row + 50), [row, row, 7, vocabulary - 1]) if params.penalizes else None
        banned = frozenset([row, 2 * row]) if row % 5 == 4 else frozenset[int]()
        allowed = np.full(vocabulary // 32 + 1, 0xF0F00F0F, dtype=np.uint32) if row % 7 == 5 else None
        draws.append(Draw(row, params, row % 3, row * 3, counts, banned, (None, 0, 5)[row % 3], allowed))
    return draws


@pytest.mark.parametrize("vocabulary", [VOCAB, 4096, 49152])
@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])
def test_a_draw_does_not_depend_on_the_others(sampler: Sampler, vocabulary: int, rounded: bool) -> None:
    """C12: the same in whatever place, with whatever neighbours, log-probabilities bit for bit."""
    rows = 39
    logits = random_logits(rows, vocabulary, seed=11)
    if rounded:  # what a bfloat16 model gives: many ties
        logits = logits.bfloat16().float()
    draws = everything(rows, vocabulary)

    def some(order: Sequence[int]) -> list[Drawn]:
        return sampler.draw(logits[list(order)], [replace(draws[row], row=place) for place, row in enumerate(order)])

    solo = [some([row])[0] for row in range(rows)]
    sizes = range(1, rows + 1) if vocabulary == VOCAB else (2, 7, 32, 33)
    for size in sizes:
        assert some(range(size)) == solo[:size]
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(12)).tolist()
    assert some(shuffled) == [solo[row] for row in shuffled]
    drawn_only = [row for row in range(rows) if not draws[row].params.greedy]
    assert some(drawn_only) == [solo[row] for row in drawn_only]
    assert sampler.draw(logits, draws[::3]) == solo[::3]
    assert sampler.draw(logits, draws[::-1]) == solo[::-1]


def test_a_draw_does_not_depend_on_the_others_parameters(sampler: Sampler) -> None:
    logits = random_logits(6, seed=13)
    for mine in mixed_params(len(KINDS)):
        (expected,) = tokens_of(sampler, logits[:1], [Draw(0, mine, 0, 5)])
        for theirs in KINDS:
            assert tokens_of(sampler, logits, each_row([mine, *[theirs] * 5], [5] * 6))[0] == expected


def test_the_number_of_threads_changes_nothing(sampler: Sampler) -> None:
    """Nor does a neighbour, with threads."""
    rows = 30
    logits, draws = random_logits(rows, 49152, seed=14), everything(rows, 49152)
    scores = [Score(row, row * 100, 3) for row in range(rows)]
    expected = sampler.draw(logits, draws), sampler.score(logits, scores)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert (sampler.draw(logits, draws), sampler.score(logits, scores)) == expected
        assert sampler.draw(logits, draws[5:12]) == expected[0][5:12]
        assert sampler.draw(logits, draws[9:10]) == expected[0][9:10]
    torch.set_num_threads(1)


@pytest.mark.parametrize("many_rows", [64, 65, 130])
def test_more_draws_than_are_made_at_once(sampler: Sampler, many_rows: int) -> None:
    logits = random_logits(many_rows, 300, seed=15)
    draws = each_row(mixed_params(many_rows))
    draws = [replace(draw, params=replace(draw.params, logit_bias=())) for draw in draws]
    assert tokens_of(sampler, logits, draws) == [tokens_of(sampler, logits, [draw])[0] for draw in draws]


def test_the_same_seed_gives_the_same_token_in_every_slot_and_call(sampler: Sampler) -> None:
    """C12, C13: at once in several slots, and one call after the other."""
    row = random_logits(1, seed=16)[0]
    for kind in KINDS:
        params = replace(kind, seed=42)
        together = tokens_of(sampler, row.expand(7, -1).contiguous(), each_row([params] * 7, [3] * 7))
        later = [tokens_of(sampler, row[None], each_row([params], [3]))[0] for _ in range(3)]
        assert len({*together, *later}) == 1
    assert TorchSampler().draw(row[None], each_row([params], [3]))[0].token_id == later[0]


def test_the_choices_of_a_request_draw_from_one_row(sampler: Sampler) -> None:
    """C11: each has randomness of its own, and the same every time."""
    logits = random_logits(3, seed=17, scale=1.0)
    for kind in KINDS:
        draws = [Draw(1, replace(kind, seed=1), choice, 0, logprobs=2) for choice in range(6)]
        got = sampler.draw(logits, draws)
        assert got == [sampler.draw(logits[1:2], [replace(draw, row=0)])[0] for draw in draws]
        if kind in (SamplingParams(), SamplingParams(temperature=2.0)):
            assert len({drawn.token_id for drawn in got}) == 6


def test_draws_may_share_a_row_and_still_change_it_each_for_itself(sampler: Sampler) -> None:
    logits = random_logits(2, seed=18)
    best = logits[1].argsort(descending=True).tolist()
    banned = [frozenset(best[:count]) for count in range(4)]
    draws = [Draw(1, GREEDY, choice, 0, banned=ban) for choice, ban in enumerate(banned)]
    assert tokens_of(sampler, logits, draws) == best[:4]


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 1023, 8191, 50257])
def test_every_size_of_vocabulary(sampler: Sampler, vocabulary: int) -> None:
    logits = random_logits(len(KINDS), vocabulary, seed=19)
    params = [replace(each, logit_bias=()) for each in mixed_params(len(KINDS))]
    draws = [replace(draw, logprobs=3) for draw in each_row(params)]
    got = sampler.draw(logits, draws)
    assert all(drawn.token_id is not None and 0 <= drawn.token_id < vocabulary for drawn in got)
    assert got == [sampler.draw(logits, [draw])[0] for draw in draws]
    assert tokens_of(sampler, logits, each_row([GREEDY] * len(KINDS))) == logits.argmax(dim=-1).tolist()


def test_a_row_can_be_a_view_into_something_else(sampler: Sampler) -> None:
    logits = random_logits(12, 1024)
    spread = torch.zeros(24, 1024 + 3)
    spread[::2, 3:] = logits
    draws = [replace(draw, logprobs=1) for draw in each_row(mixed_params(12))]
    assert sampler.draw(spread[::2, 3:], draws) == sampler.draw(logits, draws)


def test_the_logits_are_left_alone(sampler: Sampler) -> None:
    for vocabulary in (1000, 1024):
        logits = random_logits(39, vocabulary)
        before = logits.clone()
        sampler.draw(logits, everything(39, vocabulary))
        sampler.score(logits, [Score(row, row, 2) for row in range(39)])
        assert torch.equal(logits, before)


def test_no_rows_no_tokens(sampler: Sampler) -> None:
    assert sampler.draw(torch.empty(0, VOCAB), []) == []
    assert sampler.score(torch.empty(0, VOCAB), []) == []


def test_logits_made_in_inference_mode_are_fine(sampler: Sampler) -> None:
    draws = each_row(mixed_params(26))
    with torch.inference_mode():
        logits = random_logits(26) + 0
        inside = TorchSampler().draw(logits, draws)
    assert inside == TorchSampler().draw(logits, draws) == sampler.draw(logits.clone(), draws)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 500, VOCAB - 1])
def test_a_row_with_a_value_that_is_no_number_fails_alone(sampler: Sampler, bad: float, where: int) -> None:
    """K05, C01: an error for its request, and not a bit changes for the others."""
    logits = random_logits(26)
    draws = [replace(draw, logprobs=1) for draw in each_row(mixed_params(26))]
    expected = sampler.draw(logits, draws)
    for row in range(26):
        broken = logits.clone()
        broken[row, where] = bad
        got = sampler.draw(broken, draws)
        assert got[row] == Drawn(None, error=NON_FINITE, finite=False)
        assert [*got[:row], *got[row + 1 :]] == [*expected[:row], *expected[row + 1 :]]


def test_what_a_request_changes_does_not_hide_a_value_that_is_no_number(sampler: Sampler) -> None:
    """K05"""
    logits = random_logits(2)
    logits[:, 5] = torch.tensor([math.nan, math.inf])
    for params in (replace(GREEDY, logit_bias=((5, -100.0),)), replace(GREEDY, repetition_penalty=2.0)):
        draws = [Draw(row, params, 0, 0, TokenCounts([5]), frozenset([5])) for row in range(2)]
        assert [drawn.error for drawn in sampler.draw(logits, draws)] == [NON_FINITE] * 2


def test_rows_without_any_possible_token_fail(sampler: Sampler) -> None:
    """K05: all NaN, all infinite, nothing left."""
    logits = random_logits(26)
    draws = each_row(mixed_params(26))
    for value in (math.nan, math.inf, -math.inf):
        got = sampler.draw(torch.full((26, VOCAB), value), draws)
        assert [(drawn.token_id, drawn.error) for drawn in got] == [(None, NON_FINITE)] * 26
    logits[:, ::2] = -math.inf
    got = sampler.draw(logits, draws)
    assert all(drawn.token_id is not None and drawn.token_id % 2 == 1 for drawn in got)
