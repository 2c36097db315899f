"""The native sampler beside torch's, beside itself at other levels and with other threads, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.worker.kernels.native import NATIVE, TEAMS
from tests.unit.worker.sampling import GREEDY, SAMPLERS, random_logits
from tests.unit.worker.test_sampler_rows import everything
from worker.params import SamplingParams
from worker.sampling.draw import Draw, Score
from worker.sampling.native import NativeSampler
from worker.sampling.philox import uniforms
from worker.sampling.sampler import TorchSampler, sampler_for

if TYPE_CHECKING:
    from worker.kernels.native.library import Native
    from worker.sampling.draw import Sampler

ROWS = 260
levels = pytest.mark.parametrize("native", NATIVE.values(), ids=NATIVE)


@levels
def test_it_draws_what_torchs_draws(native: Native) -> None:
    """But where ``exp``, which isn't the same, puts an edge on the other side of a random number: hardly ever."""
    logits, draws = random_logits(ROWS, 5000, seed=51), everything(ROWS, 5000)
    mine, theirs = NativeSampler(native).draw(logits, draws), TorchSampler().draw(logits, draws)
    same = [one.token_id == other.token_id for one, other in zip(mine, theirs, strict=True)]
    assert sum(same) >= ROWS - 1
    for one, other, equal in zip(mine, theirs, same, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]
            told = [logprob for _, logprob in other.logprobs.top]
            assert [logprob for _, logprob in one.logprobs.top] == pytest.approx(told, abs=2e-6)
            if equal:
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=2e-6)


@levels
def test_three_threads_are_as_one(native: Native) -> None:
    logits, draws = random_logits(ROWS, 5000, seed=52), everything(ROWS, 5000)
    scores = [Score(row, row * 10, row % 4) for row in range(ROWS)]
    one, three = NativeSampler(native), NativeSampler(TEAMS[native.level])
    assert three.draw(logits, draws) == one.draw(logits, draws)
    assert three.score(logits, scores) == one.score(logits, scores)


def test_levels_of_one_digest_have_the_same_bits() -> None:
    """Those of AVX-512 do; a fleet takes such workers for equal."""
    logits, draws = random_logits(ROWS, 5000, seed=53), everything(ROWS, 5000)
    found: dict[str, object] = {}
    for native in NATIVE.values():
        own = NativeSampler(native)
        assert found.setdefault(own.digest, own.draw(logits, draws)) == own.draw(logits, draws)
    wide = [NativeSampler(NATIVE[level]).digest for level in ("amx", "avx512_bf16", "avx512") if level in NATIVE]
    assert len({*wide}) <= 1


@levels
def test_exp_is_within_two_units_in_the_last_place(native: Native) -> None:
    """Of two tokens, each alone in its block, the likelier one's log-probability is -log(1 + e^-x)."""
    apart = torch.linspace(3, 14, 20_000)
    logits = torch.full((len(apart), 65), -torch.inf)
    logits[:, 0], logits[:, 64] = 0, -apart
    scored = NativeSampler(native).score(logits, [Score(row, 0, 0) for row in range(len(logits))])
    found = np.expm1(-np.array([one.logprob for one in scored], dtype=np.float64))
    exact = apart.neg().double().exp().numpy()
    assert (np.abs(found - exact) / np.spacing(exact.astype(np.float32))).max() < 2.5  # half a unit is the logprob's


@pytest.fixture(scope="module")
def ends() -> tuple[int, int]:
    """Seeds of the smallest and of the largest of a million random numbers: 1e-6 from the end."""
    seeds = range(1_000_000)
    numbers = uniforms(seeds, [0] * len(seeds), [0] * len(seeds))[0]
    return int(numbers.argmin()), int(numbers.argmax())


@pytest.mark.parametrize(("end", "expected"), [(0, 300), (1, 997)])
def test_random_numbers_next_to_both_ends(sampler: Sampler, ends: tuple[int, int], end: int, expected: int) -> None:
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [300, 500, 997]] = torch.tensor([1.0, 0.9, 0.8])
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=100),
        SamplingParams(top_p=0.999999),
        SamplingParams(min_p=0.1),
    ):
        (drawn,) = sampler.draw(logits, [Draw(0, replace(params, seed=ends[end]), 0, 0)])
        assert drawn.token_id == expected


@levels
def test_what_is_not_in_the_logits_is_refused(native: Native) -> None:
    """Instead of being read from somewhere else in memory."""
    own, logits = NativeSampler(native), random_logits(3, 100)
    for row in (-1, 3):
        with pytest.raises(ValueError, match=f"rows {row} to {row} are wanted of 3"):
            own.draw(logits, [Draw(row, GREEDY, 0, 0)])
        with pytest.raises(ValueError, match="are wanted of 3"):
            own.score(logits, [Score(row, 0, 0)])
    for token in (-1, 100):
        with pytest.raises(ValueError, match="none of the vocabulary's 100"):
            own.score(logits, [Score(0, token, 0)])
    for wrong in (logits.double(), logits.t(), logits.bfloat16()):
        with pytest.raises(ValueError, match=r"no torch\.float32|not contiguous"):
            own.draw(wrong, [Draw(0, GREEDY, 0, 0)])


def test_native_kernels_are_used_where_there_are_any_and_the_logits_are_on_the_cpu() -> None:
    native = next(iter(NATIVE.values()), None)
    assert isinstance(sampler_for(torch.device("cpu"), None), TorchSampler)
    assert isinstance(sampler_for(torch.device("cuda"), native), TorchSampler)
    assert isinstance(sampler_for(torch.device("cpu"), native), NativeSampler) == (native is not None)
    assert "torch" in SAMPLERS
