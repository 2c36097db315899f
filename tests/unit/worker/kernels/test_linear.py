from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from worker.kernels.linear import RowExactLinear, RowExactWeight, cuts, padded_rows
from worker.kernels.products import TILES

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = [(192, 576), (576, 192), (100, 48), (7, 33), (3, 1)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    layer = RowExactLinear(randn(*shape, dtype=dtype), randn(shape[0], dtype=dtype) if bias else None)
    assert layer.recipe.exact
    rows = randn(300, shape[1], dtype=dtype)
    expected = layer(rows)
    assert expected.shape == (300, shape[0])
    for start, stop in ((0, 1), (0, 2), (5, 20), (5, 21), (100, 117), (37, 101), (41, 169), (1, 300)):
        assert torch.equal(layer(rows[start:stop]), expected[start:stop])
        assert torch.equal(layer(rows[None, start:stop])[0], expected[start:stop])
    shuffled = torch.randperm(300)
    assert torch.equal(layer(rows[shuffled]), expected[shuffled])


@pytest.mark.parametrize("shape", [*SHAPES, (64, 40), (20, 31)])
def test_a_row_that_is_not_a_number_stays_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = RowExactLinear(randn(*shape, dtype=dtype), None)
    rows = randn(920, shape[1], dtype=dtype)  # a tile of each size
    expected = layer(rows)
    for broken in (1, 16, 17, 127, 128, 500, 511, 512, 700, 768, 850, 895, 900, 919):
        for what in (torch.nan, torch.inf):
            given = rows.clone()
            given[broken] = what
            others = torch.arange(920) != broken
            assert torch.equal(layer(given)[others], expected[others])


def test_rows_that_lie_apart_are_rows(dtype: torch.dtype) -> None:
    layer = RowExactLinear(randn(24, 32, dtype=dtype), None)
    wide = randn(32, 64, dtype=dtype)
    assert torch.equal(layer(wide[:, 32:]), layer(wide[:, 32:].contiguous()))
    assert torch.equal(layer(wide[:20, 32:]), layer(wide[:20, 32:].contiguous()))


def test_it_is_the_product(dtype: torch.dtype) -> None:
    weight, bias, x = randn(40, 64, dtype=dtype), randn(40, dtype=dtype), randn(3, 7, 64, dtype=dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())
    error = (RowExactLinear(weight, bias)(x).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)


def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    assert RowExactLinear(torch.ones(4, 8).to(dtype), None)(torch.ones(1, 0, 8).to(dtype)).shape == (1, 0, 4)


@pytest.mark.usefixtures("two_threads")
def test_two_threads_keep_the_promise(dtype: torch.dtype) -> None:
    layer = RowExactLinear(randn(576, 1536, dtype=dtype), None)
    assert layer.recipe.exact
    rows = randn(200, 1536, dtype=dtype)
    expected = layer(rows)
    assert torch.equal(torch.cat([layer(row[None]) for row in rows[90:130]]), expected[90:130])


class TestRowExactWeight:
    """A weight that a model multiplies by itself."""

    def test_linear_is_exact_and_everything_else_is_as_ever(self, dtype: torch.dtype) -> None:
        weight, bias, rows = randn(10, 24, dtype=dtype), randn(10, dtype=dtype), randn(50, 24, dtype=dtype)
        wrapped = RowExactWeight.wrap(weight)
        expected = F.linear(rows, wrapped)
        assert type(expected) is torch.Tensor
        assert torch.equal(expected, RowExactLinear(weight, None, lean=True)(rows))
        assert torch.equal(F.linear(rows[3:4], wrapped), expected[3:4])
        assert torch.equal(F.linear(rows, wrapped, bias), expected + bias)
        assert type(wrapped.double()) is torch.Tensor
        assert torch.equal(wrapped.double(), weight.double())

    def test_one_of_several_is_picked(self, dtype: torch.dtype) -> None:
        weights, rows = randn(3, 10, 24, dtype=dtype), randn(50, 24, dtype=dtype)
        wrapped = RowExactWeight.wrap(weights)
        for index in (2, torch.tensor(1)):
            expected = F.linear(rows, wrapped[index])
            assert torch.equal(expected, RowExactLinear(weights[index], None, lean=True)(rows))
            assert torch.equal(F.linear(rows[7:9], wrapped[index]), expected[7:9])
        assert type(wrapped[1:]) is torch.Tensor

    def test_no_copy_is_kept(self) -> None:
        weights = randn(3, 10, 24, dtype=torch.bfloat16)
        wrapped = RowExactWeight.wrap(weights)
        assert wrapped.data_ptr() == weights.data_ptr()
        expected = F.linear(weights[0, :1], wrapped[2])
        weights[2] *= 2
        assert torch.equal(F.linear(weights[0, :1], wrapped[2]), expected * 2)


def test_cuts_are_tiles_largest_first() -> None:
    assert cuts(0, TILES) == ()
    assert cuts(16, TILES) == ((0, 16),)
    assert cuts(240, TILES) == ((0, 128), (128, 192), (192, 224), (224, 240))
    assert cuts(48, (16,)) == ((0, 16), (16, 32), (32, 48))


def test_padding_prefers_few_large_tiles() -> None:
    rows = [1, 16, 17, 32, 33, 48, 64, 65, 80, 81, 128, 129, 512]
    assert [padded_rows(count) for count in rows] == [16, 16, 32, 32, 64, 64, 64, 80, 80, 128, 128, 144, 512]
    assert all(padded_rows(count) >= count and padded_rows(count) % 16 == 0 for count in range(1, 700))
    assert [padded_rows(count, (16,)) for count in (1, 33, 65)] == [16, 48, 80]
