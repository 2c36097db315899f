from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from worker.kernels.linear import TILES, RowExactLinear, cuts, exact_tiles, padded_rows

SHAPES = [(192, 576), (576, 192), (100, 48), (7, 33), (3, 1)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = RowExactLinear(torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if bias else None)
    rows = torch.randn(300, shape[1]).to(dtype)
    expected = layer(rows)
    assert expected.shape == (300, shape[0])
    for start, stop in ((0, 1), (0, 2), (5, 20), (5, 21), (100, 117), (37, 101), (41, 169), (1, 300)):
        assert torch.equal(layer(rows[start:stop]), expected[start:stop])
    shuffled = torch.randperm(300)
    assert torch.equal(layer(rows[shuffled]), expected[shuffled])


def test_it_is_the_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 64).to(dtype), torch.randn(40).to(dtype), torch.randn(3, 7, 64).to(dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())
    error = (RowExactLinear(weight, bias)(x).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)


def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    assert RowExactLinear(torch.ones(4, 8).to(dtype), None)(torch.ones(1, 0, 8).to(dtype)).shape == (1, 0, 4)


def test_two_threads_keep_the_promise(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        layer = RowExactLinear(torch.randn(576, 1536).to(dtype), None)
        rows = torch.randn(200, 1536).to(dtype)
        expected = layer(rows)
        assert torch.equal(torch.cat([layer(row[None]) for row in rows[90:130]]), expected[90:130])
    finally:
        torch.set_num_threads(threads)


class TestExactTiles:
    """Which tiles are kept."""

    def test_a_tile_that_disagrees_is_dropped(self) -> None:
        def make(weight: torch.Tensor):  # type: ignore[no-untyped-def]
            return lambda x: x @ weight.T + (1.0 if len(x) in {32, 128} else 0.0)

        assert exact_tiles(make, (5, 8), torch.float32) == (64, 16)

    def test_the_smallest_stays_and_is_reported_when_places_matter(self, caplog: pytest.LogCaptureFixture) -> None:
        def make(weight: torch.Tensor):  # type: ignore[no-untyped-def]
            return lambda x: x @ weight.T + torch.arange(len(x))[:, None]

        with caplog.at_level(logging.WARNING):
            assert exact_tiles(make, (5, 8), torch.float32) == (16,)
        assert "depend on a row's place in its tile" in caplog.text

    def test_another_order_of_additions_is_seen_through_bfloat16(self) -> None:
        """Eight additions in another order, in one of the tiles: most of what they change is rounded away."""

        def make(weight: torch.Tensor):  # type: ignore[no-untyped-def]
            def product(x: torch.Tensor) -> torch.Tensor:
                terms = x.float()[:, None] * weight.float()
                order = range(64) if len(x) == 64 else [*range(8, 64), *range(8)]
                total = torch.zeros(len(x), len(weight))
                for index in order:
                    total += terms[..., index]
                return total.to(torch.bfloat16)

            return product

        assert exact_tiles(make, (16, 64), torch.bfloat16) == (128, 32, 16)


def test_cuts_are_tiles_largest_first() -> None:
    assert cuts(0, TILES) == ()
    assert cuts(16, TILES) == ((0, 16),)
    assert cuts(240, TILES) == ((0, 128), (128, 192), (192, 224), (224, 240))
    assert cuts(48, (16,)) == ((0, 16), (16, 32), (32, 48))


def test_padding_prefers_few_large_tiles() -> None:
    rows = [1, 16, 17, 32, 33, 48, 64, 65, 80, 81, 128, 129, 512]
    assert [padded_rows(count) for count in rows] == [16, 16, 32, 32, 64, 64, 64, 80, 80, 128, 128, 144, 512]
    assert all(padded_rows(count) >= count and padded_rows(count) % 16 == 0 for count in range(1, 700))
