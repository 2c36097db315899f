"""The passes over whole vocabularies by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.worker.sampling import random_logits
from worker.sampling.scan import BLOCK, Scanner

WIDTH = 20 * BLOCK
scan = Scanner()


def every_row(rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(rows)


def degrees(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_maxima_are_exact_and_sums_are_near() -> None:
    logits = random_logits(5, WIDTH, seed=1, scale=8)
    logits[1] -= 1000
    logits[2, 7] = 3e38
    logits[3, 64:192] = -torch.inf
    temperatures = degrees(1, 0.3, 2, 1, 1e-3, 1e30)
    rows = np.array([0, 0, 1, 2, 3, 4])
    found = scan(logits, rows, temperatures)
    assert np.array_equal(found.maxima, logits.view(5, -1, BLOCK).amax(-1).numpy())
    assert np.array_equal(found.highest, logits.amax(-1).numpy())
    shifted = (logits.double() - logits.double().amax(-1, keepdim=True))[rows]
    expected = (shifted / torch.from_numpy(temperatures).double()[:, None]).exp().view(6, -1, BLOCK).sum(-1).numpy()
    assert found.sums == pytest.approx(expected, rel=1e-5, abs=1e-30)
    assert (found.sums[4, 1:3] == 0).all()


def test_what_is_not_finite_shows_in_its_row_alone() -> None:
    logits = random_logits(9, WIDTH, seed=2)
    expected = scan(logits.clone(), every_row(9), np.ones(9, dtype=np.float32))
    for place in (0, 15, 16, 63, 64, WIDTH - 1):
        for value in (torch.nan, torch.inf):
            given = logits.clone()
            given[4, place] = value
            found = scan(given, every_row(9), np.ones(9, dtype=np.float32))
            others = every_row(9) != 4
            assert np.array_equal(found.maxima[others], expected.maxima[others])
            assert np.array_equal(found.sums[others], expected.sums[others])
            assert np.isfinite(found.maxima[4]).tolist() == [block != place // BLOCK for block in range(20)]
            assert not np.isfinite(found.highest[4])
    given[:] = -torch.inf
    assert (scan(given, every_row(9), np.ones(9, dtype=np.float32)).highest == -np.inf).all()


def test_a_row_has_the_same_bits_in_any_company() -> None:
    logits = random_logits(33, WIDTH, seed=3)
    temperatures = degrees(*(0.1 + 0.05 * row for row in range(33)))
    alone = [scan(logits[row : row + 1], every_row(1), temperatures[row : row + 1]) for row in range(33)]
    found = scan(logits, every_row(33), temperatures)
    some = scan(logits[3:30:2].contiguous(), every_row(14), temperatures[3:30:2])
    for row, one in enumerate(alone):
        assert np.array_equal(one.sums[0], found.sums[row])
        assert np.array_equal(one.maxima[0], found.maxima[row])
    assert np.array_equal(some.sums, found.sums[3:30:2])


def test_no_sum_is_made_that_nobody_wants() -> None:
    found = scan(random_logits(4, WIDTH), every_row(0), degrees())
    assert found.sums.shape == (0, 20)
    assert found.maxima.shape == (4, 20)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64])
def test_weights_of_single_tokens_are_those_of_the_sums(count: int) -> None:
    """Each alone in a block: what is drawn within a block is in proportion to the blocks, bit for bit."""
    logits = torch.full((1, count * BLOCK), -torch.inf)
    logits[0, ::BLOCK] = torch.linspace(-20, 3, count)
    temperatures = degrees(*[0.7] * count)
    found = scan.weights(logits[0, ::BLOCK].numpy().copy(), degrees(*[float(logits.max())] * count), temperatures)
    assert found.dtype == np.float64
    assert found.tolist() == scan(logits, every_row(1), temperatures[:1]).sums[0].astype(np.float64).tolist()
    assert found[-1] == 1
