"""Which form and which tiles a weight gets. The products here are written out, so that their faults are known."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from worker.kernels import products
from worker.kernels.products import FORMS, TILES, choose, ladder, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.kernels.products import Form

SHAPE = (5, 8)


def by_hand(x: torch.Tensor, weight: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Adds up in a given order, each row for itself."""
    total = torch.zeros(len(x), len(weight))
    for index in order:
        total += x.float()[:, None, index] * weight.float()[None, :, index]
    return total.to(x.dtype)


def form(fault: Callable[[torch.Tensor], torch.Tensor | float] = lambda x: 0.0) -> Form:
    """Products that are right but for what ``fault`` adds to them."""
    return lambda weight, bias: lambda x: by_hand(x, weight) + fault(x)


def places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x))[:, None]


def test_a_tile_that_disagrees_is_dropped() -> None:
    found = measure({"a": form(lambda x: float(len(x) in {32, 128}))}, SHAPE, torch.float32, bias=False)
    assert (found.form, found.tiles, found.exact) == ("a", (512, 256, 64, 16), True)


def test_a_form_whose_rows_depend_on_their_place_is_passed_over() -> None:
    found = measure({"a": form(places), "b": form()}, SHAPE, torch.float32, bias=False)
    assert (found.form, found.tiles, found.exact) == ("b", TILES, True)


def test_the_last_places_of_a_tile_are_looked_at_too() -> None:
    found = measure({"a": form(lambda x: (places(x) == 15) * 1.0)}, SHAPE, torch.float32, bias=False)
    assert found.tiles == (8,)


def test_smaller_tiles_are_better_than_another_form() -> None:
    narrow = form(lambda x: places(x) // 8 * 1.0)
    found = measure({"a": narrow, "b": form()}, SHAPE, torch.float32, bias=False)
    assert (found.form, found.tiles) == ("a", (8,))
    found = measure({"a": form(lambda x: (places(x) // 4 > 0) * float(len(x) > 4))}, SHAPE, torch.float32, bias=False)
    assert found.tiles == (4,)


def test_a_head_gets_no_tile_that_its_rows_never_fill() -> None:
    found = measure({"a": form()}, (1 << 14, 8), torch.float32, bias=False)
    assert found.tiles == (128, 64, 32, 16)


def test_single_rows_are_the_last_resort() -> None:
    found = measure({"a": form(places), "b": form(places)}, SHAPE, torch.float32, bias=False)
    assert (found.form, found.tiles, found.exact) == ("a", (1,), True)


def test_no_promise_is_made_when_even_single_rows_vary(caplog: pytest.LogCaptureFixture) -> None:
    calls = iter(range(10**6))
    with caplog.at_level(logging.WARNING):
        found = measure({"a": form(lambda x: float(next(calls)))}, SHAPE, torch.float32, bias=False)
    assert (found.tiles, found.exact) == ((16,), False)
    assert "depend on its place in every form" in caplog.text


def test_a_tile_in_which_a_row_without_numbers_spreads_is_dropped() -> None:
    def spreading(x: torch.Tensor) -> torch.Tensor:
        return x.roll(-1, 0)[:, :1] * 0.0 if len(x) > 32 else torch.zeros(1)

    assert measure({"a": form(spreading)}, SHAPE, torch.float32, bias=False).tiles == (32, 16)


def test_another_order_of_additions_is_seen_through_bfloat16() -> None:
    """Eight additions in another order, in one of the tiles: most of what they change is rounded away."""

    def make(weight: torch.Tensor, _: torch.Tensor | None) -> products.Product:
        return lambda x: by_hand(x, weight, range(64) if len(x) == 64 else [*range(8, 64), *range(8)])

    assert measure({"a": make}, (16, 64), torch.bfloat16, bias=False).tiles == (512, 256, 128, 32, 16)


def test_digests_tell_orders_apart_and_nothing_else() -> None:
    def make(order: Sequence[int]) -> Form:
        return lambda weight, _: lambda x: by_hand(x, weight, order)

    one, same, other = (
        measure({"a": make(order)}, SHAPE, torch.float32, bias=False).digest
        for order in (range(8), range(8), range(7, -1, -1))
    )
    assert one == same != other


class TestLadder:
    """Which forms are tried."""

    def test_where_bfloat16_is_multiplied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(products, "multiplies_bfloat16", lambda: True)
        assert list(ladder(torch.bfloat16)) == ["packed", "plain", "widened"]

    def test_where_it_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
        assert list(ladder(torch.bfloat16)) == ["widened", "padded", "plain"]

    def test_float32_and_weights_that_are_not_copied(self) -> None:
        assert list(ladder(torch.float32)) == ["plain", "padded"]
        assert list(ladder(torch.bfloat16, lean=True)) == ["plain"]


@pytest.mark.parametrize("name", ["plain", "widened", "padded"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [64, 33])
def test_every_form_is_the_product(name: str, bias: bool, inputs: int) -> None:
    torch.manual_seed(0)
    weight, added, x = torch.randn(40, inputs), torch.randn(40), torch.randn(16, inputs)
    weight, added, x = (given.bfloat16() for given in (weight, added, x))
    expected = x.double() @ weight.double().T + (added.double() if bias else 0)
    found = FORMS[name](weight, added if bias else None)(x)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).norm() / expected.norm()) < 4e-3


def test_recipes_belong_to_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def spy(forms: object, shape: tuple[int, int], dtype: torch.dtype, *, bias: bool) -> products.Recipe:
        asked.append(shape)
        return products.Recipe("plain", TILES, True, "", 1.0, 1.0)

    monkeypatch.setattr(products, "measure", spy)
    products._choose.cache_clear()
    for threads in (3, 3, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        choose((9, 9), torch.float32, bias=False)
    products._choose.cache_clear()
    assert asked == [(9, 9), (9, 9)]
