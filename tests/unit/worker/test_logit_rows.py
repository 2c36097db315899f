"""The passes over whole vocabularies: the same bits for a row in whatever company, place and memory it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.worker.sampling import random_logits
from worker.sampling.likeliest import edges_by_count, edges_by_share
from worker.sampling.logit_rows import LogitRows, Scratch, Wanted
from worker.sampling.scan import Scanner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worker.sampling.scan import Doubles

VOCABULARIES = [1, 3, 15, 16, 17, 63, 64, 65, 100, 1000, 1024, 4097, 32000, 49152, 50257, 128256]


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def masses(logits: torch.Tensor, rows: Sequence[int], temperatures: Sequence[float]) -> tuple[Doubles, Doubles]:
    """Block maxima and masses of some rows, each at its temperature."""
    wanted = Wanted(np.arange(len(rows)), np.array(temperatures, dtype=np.float32))
    found = LogitRows(logits, rows, wanted, Scanner(), Scratch())
    return found.maxima.astype(np.float64), found.masses(wanted.rows)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_rows_numbers_do_not_depend_on_its_company(vocabulary: int) -> None:
    rows = 11
    logits = random_logits(rows, vocabulary, seed=41, scale=5.0)
    logits[4] -= 200  # where exp must be shifted
    temperatures = [(1.0, 0.7, 1.0, 2.5)[row % 4] for row in range(rows)]
    maxima, sums = masses(logits, range(rows), temperatures)
    for some in ([0], [3], [4], [10], [0, 1], [2, 3, 4, 5], [1, 4, 6, 7, 10], [5, 6, 7, 8, 9]):
        own = [temperatures[row] for row in some]
        for got in (
            masses(logits, some, own),
            masses(logits[some].clone(), range(len(some)), own),
            masses(torch.nn.functional.pad(logits, (5, 0))[:, 5:], some, own),
        ):
            assert np.array_equal(got[0], maxima[some])
            assert np.array_equal(got[1], sums[some])


@pytest.mark.parametrize("vocabulary", [100, 1000, 49152, 50257])
def test_nor_on_threads(vocabulary: int, two_threads: None) -> None:
    logits = random_logits(13, vocabulary, seed=42)
    degrees = [1.0] * 7 + [0.8] * 6
    expected = masses(logits, range(13), degrees)
    torch.set_num_threads(1)
    got = masses(logits, range(13), degrees)
    assert np.array_equal(got[0], expected[0])
    assert np.array_equal(got[1], expected[1])


@pytest.mark.parametrize("offset", range(17))
def test_nor_on_where_it_is_in_memory(offset: int) -> None:
    """What is next to each other is used as it is, at whatever address."""
    expected = masses(random_logits(3, 1024, seed=43), range(3), [1.0, 1.0, 0.5])
    memory = torch.zeros(3 * 1024 + 17)
    logits = memory[offset : offset + 3 * 1024].view(3, 1024)
    logits.copy_(random_logits(3, 1024, seed=43))
    got = masses(logits, range(3), [1.0, 1.0, 0.5])
    assert np.array_equal(got[1], expected[1])


def test_exp_of_a_number_is_the_same_wherever_it_stands(two_threads: None) -> None:
    """What the above rests on, by itself."""
    numbers = -torch.rand(70000, generator=torch.Generator().manual_seed(44)) * 100
    expected = torch.exp(numbers)
    for length in (1, 2, 3, 7, 15, 16, 17, 31, 33, 100, 1023, 33000, 69000):
        for start in (0, 1, 5, 16, 63, 900):
            target = torch.empty(length + 3)[3:]
            assert torch.equal(torch.exp(numbers[start : start + length], out=target), expected[start : start + length])
            assert torch.equal(torch.exp(numbers[start : start + length].clone()), expected[start : start + length])


def test_masses_are_whole_units_whose_sums_are_exact() -> None:
    logits = random_logits(4, 49152, seed=45)
    logits[3] = 0.0
    _, found = masses(logits, range(4), [0.5, 1.0, 2.0, 1.0])
    unit = 2.0**37
    assert np.array_equal(found, np.floor(found))
    shuffled = np.random.default_rng(0).permutation(found, axis=1)
    assert np.array_equal(shuffled.cumsum(axis=1)[:, -1], found.sum(axis=1))
    assert found.sum(axis=1).max() < 2**53
    temperatures = torch.tensor([0.5, 1.0, 2.0, 1.0], dtype=torch.float64)[:, None]
    scaled = (logits.double() - logits.double().amax(dim=-1, keepdim=True)) / temperatures
    assert (found.sum(axis=1) / unit).tolist() == pytest.approx(scaled.exp().sum(dim=-1).tolist(), rel=1e-6)


def test_guessed_edges_are_nearly_always_low_enough_and_never_far_too_low() -> None:
    """Of peaked distributions, as a model's are: few tokens have most of the weight."""
    ranks = torch.arange(1, 49153).double().log()
    order = torch.randperm(49152, generator=torch.Generator().manual_seed(46))
    spread = torch.linspace(0.8, 3.0, 40)[:, None]
    logits = torch.empty(40, 49152)
    logits[:, order] = (-ranks * spread).float() + random_logits(40, 49152, seed=47, scale=0.5)
    wanted = Wanted(np.arange(40), np.ones(40, dtype=np.float32))
    rows = LogitRows(logits, range(40), wanted, Scanner(), Scratch())
    edges = edges_by_share(rows, wanted.rows, wanted.rows, np.full(40, 0.1))
    below = torch.where(logits <= torch.from_numpy(edges)[:, None], torch.softmax(logits.double(), -1), 0.0).sum(-1)
    assert (below <= 0.1).sum() >= 38
    assert below.mean() > 0.02
    edges = edges_by_count(rows, wanted.rows, np.full(40, 50))
    above = (logits > torch.from_numpy(edges)[:, None]).sum(-1)
    assert above.min() >= 50
    assert above.max() < 200
