"""Which core a layer gets, with which tiles. The cores here are wrong in known ways."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from worker.kernels import methods
from worker.kernels.cores import LayerSpec, fused, in_pieces, never_alone, reference
from worker.kernels.methods import choose, measure
from worker.kernels.plan import Heads, TileBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from worker.kernels.cores import Core

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def spec(kv_heads: int = 2, group: int = 3, softcap: float = 0.0) -> LayerSpec:
    return LayerSpec(kv_heads * group, kv_heads, 32, 32**-0.5, 0, softcap)


def core(change: Callable[[torch.Tensor], torch.Tensor]) -> Core:
    def run(query: torch.Tensor, *rest: object) -> torch.Tensor:
        return change(query)

    return run


def found(*cores: Core, group: int = 3) -> methods.Method:
    named = [(str(index), core) for index, core in enumerate(cores)]
    return measure(named, spec(group=group), Heads(2, group, 0, 32, 1), torch.float32)


def test_a_core_whose_bits_depend_on_the_batch_is_passed_over() -> None:
    method = found(core(lambda query: query + len(query)), core(lambda query: query))
    assert (method.name, method.heads.narrow, method.exact) == ("1", 1, True)


def test_the_narrowest_width_that_agrees_is_taken() -> None:
    method = found(core(lambda query: query * (1.0 if query.shape[2] >= 12 else 2.0)))
    assert (method.name, method.heads.narrow, method.heads.wide) == ("0", 4, 32)


def test_a_core_that_treats_rows_differently_works_in_pieces() -> None:
    def uneven(query: torch.Tensor) -> torch.Tensor:
        return query + (torch.arange(query.shape[2]) // 24)[:, None]

    method = found(core(uneven))
    assert (method.name, method.exact) == ("0 by 24/12/4 rows", True)


def test_single_rows_are_the_last_resort() -> None:
    method = found(core(lambda query: query + torch.arange(query.shape[2])[:, None]))
    assert (method.name, method.heads.narrow, method.exact) == ("0 by 1 rows", 1, True)


def test_no_promise_is_made_when_nothing_helps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        method = found(core(lambda query: query + len(query)))
    assert not method.exact
    assert "a token's bits depend on its batch" in caplog.text


def test_digests_tell_bits_apart() -> None:
    one, same, other = (found(core(lambda query, factor=factor: query * factor)).digest for factor in (1.5, 1.5, 3.0))
    assert one == same != other


def test_soft_capping_needs_the_reference() -> None:
    method = choose(spec(softcap=5.0), torch.float32, CPU)
    assert (method.name.split()[0], method.exact) == ("reference", True)  # on AVX2 it takes rows in pieces


def test_elsewhere_nothing_is_measured() -> None:
    method = choose(spec(), torch.float32, torch.device("meta"))
    assert method == methods.Method(reference, "reference", Heads(2, 3, 0, 32, 1))


def test_tiles_are_narrow_for_many_threads() -> None:
    """Where torch would choose another routine by the size of the batch."""
    assert [methods._widest(group, 2) for group in (1, 3, 7, 8)] == [32, 32, 16, 16]
    assert [methods._widest(group, 24) for group in (1, 3, 7, 8)] == [32, 16, 8, 4]


def batch(tiles: int, rows: int, keys: int = 128) -> TileBatch:
    shown = torch.arange(keys) < torch.arange(60, 60 + rows)[:, None]
    visible = shown.expand(tiles, 1, rows, keys)
    bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    return TileBatch(tiles, rows, keys, torch.empty(0), torch.empty(0), visible, bias)


@pytest.mark.parametrize("made", [reference, fused])
@pytest.mark.parametrize("sizes", [(24, 12, 4), (4,), (1,)])
@pytest.mark.parametrize("rows", [1, 7, 41])
def test_pieces_are_the_whole(made: Core, sizes: tuple[int, ...], rows: int) -> None:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 3, rows, 32), torch.randn(2, 2, 3, 128, 32)
    expected = reference(query, key, value, batch(2, rows), 0.2, 0.0)
    given = in_pieces(made, sizes)(query, key, value, batch(2, rows), 0.2, 0.0)
    assert given.shape == query.shape
    assert torch.allclose(given, expected, atol=1e-5)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_lone_matrix_is_like_one_of_many(dtype: torch.dtype) -> None:
    """Products of a lone one are shared out among threads, and added up in another order."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 1, rows, 64).to(dtype) for rows in (1, 768, 768))
    visible = torch.ones(3, 1, 1, 768, dtype=torch.bool)
    many = TileBatch(3, 1, 768, torch.empty(0), torch.empty(0), visible, torch.zeros(visible.shape, dtype=dtype))
    one = TileBatch(1, 1, 768, torch.empty(0), torch.empty(0), visible[:1], many.bias[:1])
    for made in (never_alone(fused), never_alone(reference)):
        expected = made(query, key, value, many, 0.1, 0.0)
        assert torch.equal(made(query[:1], key[:1], value[:1], one, 0.1, 0.0), expected[:1])
