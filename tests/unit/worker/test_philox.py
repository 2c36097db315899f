"""Randomness: the published generator, evenly spread, and every part of its counter counts."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.worker.sampling import VOCAB, alone, chi_square_fits, random_logits
from worker.params import SamplingParams
from worker.sampling.philox import philox, uniforms

if TYPE_CHECKING:
    from worker.sampling.draw import Sampler


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
def test_it_gives_its_authors_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    columns = (np.array(words, dtype=np.uint64)[:, None].repeat(3, axis=1) for words in (counter, key))
    assert philox(*columns).tolist() == [[word] * 3 for word in expected]


def test_random_numbers_are_pinned() -> None:
    (got,) = uniforms([0, 1, 2**64 - 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1])
    assert [f"{number:.12f}" for number in got] == [
        "0.399046470849",
        "0.890259172976",
        "0.447822036474",
        "0.516679160749",
        "0.972241201522",
    ]


def test_more_numbers_for_each_row_are_others() -> None:
    columns = [0, 1, 2**64 - 1], [0, 5, 0], [0, 0, 7]
    got = uniforms(*columns, count=5)
    assert got.shape == (5, 3)
    assert got[0].tolist() == uniforms(*columns)[0].tolist()
    assert len({*got.reshape(-1).tolist()}) == 15
    assert got[:, 1].tolist() == uniforms([1], [5], [0], count=5)[:, 0].tolist()


def test_random_numbers_fill_the_unit_interval_evenly() -> None:
    (got,) = uniforms([7] * 10000, [0] * 10000, range(10000))
    assert ((got >= 0) & (got < 1)).all()
    counts = np.histogram(got, bins=100, range=(0, 1))[0]
    assert chi_square_fits([bin_ for bin_, count in enumerate(counts) for _ in range(count)], torch.full((100,), 0.01))


def test_neighbouring_seeds_choices_and_positions_have_nothing_to_do_with_each_other() -> None:
    seeds, choices, positions = zip(*product(range(20), range(20), range(20)), strict=True)
    cube = uniforms(seeds, choices, positions).reshape(20, 20, 20)
    assert len(np.unique(cube)) == 8000
    for axis in range(3):
        one, next_one = np.delete(cube, -1, axis), np.delete(cube, 0, axis)
        # The standard error of a correlation is 1 / sqrt(7600), which is 0.0115.
        assert abs(np.corrcoef(one.reshape(-1), next_one.reshape(-1))[0, 1]) < 0.04


def test_every_part_of_the_counter_matters(sampler: Sampler) -> None:
    logits = random_logits(1, scale=1.0)[0]
    base = [alone(sampler, logits, SamplingParams(seed=1), position) for position in range(20)]
    assert base == [alone(sampler, logits, SamplingParams(seed=1), position) for position in range(20)]
    assert base != [alone(sampler, logits, SamplingParams(seed=2), position) for position in range(20)]
    assert base != [alone(sampler, logits, SamplingParams(seed=1), position, choice=1) for position in range(20)]
    assert base != [alone(sampler, logits, SamplingParams(seed=1 + 2**32), position) for position in range(20)]
    assert len(set(base)) > 10


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_works(sampler: Sampler, seed: int) -> None:
    token = alone(sampler, random_logits(1)[0], SamplingParams(seed=seed))
    assert token is not None
    assert 0 <= token < VOCAB
