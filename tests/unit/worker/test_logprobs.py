"""Log-probabilities: the model's own, of the token that was drawn, with as many of the likeliest as wanted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.worker.sampling import GREEDY, KINDS, VOCAB, each_row, mixed_params, random_logits
from worker.params import SamplingParams
from worker.sampling.draw import NON_FINITE, Draw, Score, TokenLogprobs
from worker.sampling.penalties import TokenCounts

if TYPE_CHECKING:
    from worker.sampling.draw import Sampler


def close(value: float) -> object:
    return pytest.approx(value, abs=2e-6, rel=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 64, VOCAB, 49152])
@pytest.mark.parametrize("raised", [0.0, -500.0, 300.0])
def test_they_are_the_log_softmax_of_the_models_logits(sampler: Sampler, vocabulary: int, raised: float) -> None:
    logits = random_logits(6, vocabulary, seed=31) + raised
    expected = torch.log_softmax(logits.double(), -1)
    ids = [(row * 7919) % vocabulary for row in range(6)]
    top = min(5, vocabulary)
    for row, scored in enumerate(sampler.score(logits, [Score(row, ids[row], top) for row in range(6)])):
        assert scored.token_id == ids[row]
        assert scored.logprob == close(expected[row, ids[row]].item())
        best = logits[row].sort(descending=True, stable=True).indices[:top]
        assert [token for token, _ in scored.top] == best.tolist()
        assert [logprob for _, logprob in scored.top] == [close(value) for value in expected[row, best].tolist()]
        assert all(logprob <= 0 for _, logprob in scored.top)


def test_the_token_is_the_one_drawn_and_nothing_a_request_asks_for_shows(sampler: Sampler) -> None:
    """E01: not the likeliest one; neither temperature, nor restriction, nor bias, nor penalty, nor ban."""
    logits = random_logits(len(KINDS), seed=32)
    expected = torch.log_softmax(logits.double(), -1)
    draws = [replace(draw, logprobs=5) for draw in each_row(mixed_params(len(KINDS)))]
    draws[0] = replace(draws[0], params=SamplingParams(temperature=1.5, seed=1), banned=frozenset([1]))
    penalties = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, seed=3)
    draws[5] = replace(draws[5], params=penalties, counts=TokenCounts(range(500), range(250)))
    likeliest = 0
    for row, drawn in enumerate(sampler.draw(logits, draws)):
        assert drawn.token_id is not None
        assert drawn.logprobs is not None
        assert drawn.logprobs.token_id == drawn.token_id
        assert drawn.logprobs.logprob == close(expected[row, drawn.token_id].item())
        assert [token for token, _ in drawn.logprobs.top] == expected[row].argsort(descending=True)[:5].tolist()
        likeliest += drawn.token_id == drawn.logprobs.top[0][0]
    assert 2 <= likeliest < len(KINDS) - 2


def test_drawing_and_scoring_give_the_same_bits(sampler: Sampler) -> None:
    logits = random_logits(20, 49152, seed=33)
    drawn = sampler.draw(logits, [replace(draw, logprobs=3) for draw in each_row([SamplingParams(seed=1)] * 20)])
    scores = [Score(row, one.token_id or 0, 3) for row, one in enumerate(drawn)]
    assert sampler.score(logits, scores) == [one.logprobs for one in drawn]


def test_the_bits_are_those_of_the_row_alone(sampler: Sampler) -> None:
    logits = random_logits(70, 2000, seed=34)
    scores = [Score(row, row, row % 6) for row in range(70)]
    together = sampler.score(logits, scores)
    for some in (slice(3, 4), slice(0, 33), slice(1, 70, 5), slice(None, None, -1)):
        assert sampler.score(logits, scores[some]) == together[some]
    assert [sampler.score(logits[row : row + 1], [Score(0, row, row % 6)])[0] for row in range(70)] == together


def test_the_same_row_may_be_scored_for_several_tokens(sampler: Sampler) -> None:
    logits = random_logits(2, seed=35)
    got = sampler.score(logits, [Score(1, 5, 2), Score(1, 6, 0), Score(0, 5, 1)])
    assert got == [sampler.score(logits, [score])[0] for score in (Score(1, 5, 2), Score(1, 6, 0), Score(0, 5, 1))]


def test_none_are_told_unless_they_are_wanted_and_zero_is_not_none(sampler: Sampler) -> None:
    """C15"""
    draws = [Draw(0, GREEDY, 0, 0, logprobs=wanted) for wanted in (None, 0, 1)]
    got = [drawn.logprobs for drawn in sampler.draw(random_logits(1), draws)]
    assert got[0] is None
    assert got[1] is not None
    assert got[1].top == ()
    assert got[2] is not None
    assert (got[2].token_id, got[2].logprob) == got[2].top[0]


def test_equals_are_listed_by_id_at_the_edge_too(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [600, 70]] = 1.0
    (scored,) = sampler.score(logits, [Score(0, 3, 6)])
    assert [token for token, _ in scored.top] == [70, 600, 0, 1, 2, 3]
    assert len({logprob for _, logprob in scored.top}) == 2


@pytest.mark.parametrize("top", [VOCAB - 1, VOCAB])
def test_as_many_of_the_likeliest_as_there_are(sampler: Sampler, top: int) -> None:
    logits = random_logits(2, seed=36)
    expected = torch.log_softmax(logits.double(), -1)
    for row, scored in enumerate(sampler.score(logits, [Score(0, 1, top), Score(1, 1, top)])):
        assert [token for token, _ in scored.top] == logits[row].argsort(descending=True, stable=True)[:top].tolist()
        assert sum(math.exp(logprob) for _, logprob in scored.top) == pytest.approx(1.0, abs=1e-4)
        assert scored.top[-1][1] == close(expected[row, scored.top[-1][0]].item())


def test_a_token_that_cannot_be_chosen_is_infinitely_unlikely_and_never_listed(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [8, 9]] = torch.tensor([0.0, math.log(3)])
    unlikely, likely = sampler.score(logits, [Score(0, 7, 5), Score(0, 8, 0)])
    assert unlikely == TokenLogprobs(7, -math.inf, ((9, close(math.log(0.75))), (8, close(math.log(0.25)))))  # type: ignore[arg-type]
    assert likely.logprob == close(math.log(0.25))


def test_a_certain_token_has_log_probability_zero(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), -1e4)
    logits[0, 8] = 50.0
    (scored,) = sampler.score(logits, [Score(0, 8, 1)])
    assert (scored.logprob, scored.top) == (0.0, ((8, 0.0),))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_distribution_has_none(sampler: Sampler, bad: float) -> None:
    """E06: NaN when scored, an error without log-probabilities when drawn from, and the others as ever."""
    logits = random_logits(3, seed=37)
    scores = [Score(row, 5, 2) for row in range(3)]
    draws = [replace(draw, logprobs=2) for draw in each_row([SamplingParams()] * 3)]
    scored, drawn = sampler.score(logits, scores), sampler.draw(logits, draws)
    logits[1, 77] = bad
    got = sampler.score(logits, scores)
    assert (got[0], got[2]) == (scored[0], scored[2])
    assert (got[1].token_id, math.isnan(got[1].logprob), got[1].top) == (5, True, ())
    after = sampler.draw(logits, draws)
    assert (after[0], after[2]) == (drawn[0], drawn[2])
    assert (after[1].token_id, after[1].logprobs, after[1].error) == (None, None, NON_FINITE)


def test_all_impossible_is_no_distribution(sampler: Sampler) -> None:
    (scored,) = sampler.score(torch.full((1, VOCAB), -math.inf), [Score(0, 5, 2)])
    assert math.isnan(scored.logprob)
