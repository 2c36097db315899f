from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers.activations import ACT2FN

from worker.kernels.elementwise import PIECE, SHARE, UNIT, RowExactActivation, is_even, measure
from worker.model.audit import _EXACT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "sigmoid", "mish"])
def test_a_number_has_one_result_wherever_it_is(name: str, dtype: torch.dtype, threads: int) -> None:
    function = RowExactActivation(ACT2FN[name])
    assert measure(function, dtype).exact
    for width in (7, 100, 131, 896):
        some = (torch.randn(24, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)
        rows = some.repeat(6, 1)
        expected = torch.cat([function(row.repeat(16, 1))[5:6] for row in some]).repeat(6, 1)
        for count in (16, 80, 144):
            assert torch.equal(function(rows[:count]), expected[:count]), (name, width, count, threads)


@DTYPES
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, PIECE, PIECE + 64, SHARE, SHARE + 64, 3 * SHARE - 1])
def test_it_is_the_function(count: int, dtype: torch.dtype) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = RowExactActivation(nn.SiLU())(x)
    assert found.shape == x.shape
    assert torch.allclose(found.float(), F.silu(x.double()).float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_shapes_and_strides_do_not_matter() -> None:
    function, wide = RowExactActivation(nn.SiLU()), torch.randn(1, 20, 66)
    half = wide.chunk(2, -1)[1]
    assert torch.equal(function(half), function(half.reshape(-1)).view(1, 20, 33))


def test_shares_are_even_when_every_thread_gets_whole_units() -> None:
    assert is_even(UNIT, 1)
    assert not is_even(UNIT, 2)
    assert is_even(2 * UNIT, 2)
    assert not is_even(UNIT + 1, 1)
    assert is_even(48 * 1536, 2)
    assert not is_even(80 * 896, 3)
    assert is_even(2 * SHARE, 2)


def test_a_function_that_depends_on_places_is_noticed() -> None:
    def uneven(x: torch.Tensor) -> torch.Tensor:
        result = F.relu(x)
        result[-(len(x) % 16) :] += 1
        return result

    assert not measure(uneven, torch.float32).exact


def test_digests_tell_functions_apart() -> None:
    one, same, other = (measure(ACT2FN[name], torch.bfloat16).digest for name in ("relu", "relu", "relu6"))
    assert one == same != other


@DTYPES
@pytest.mark.parametrize(
    "function",
    [torch.exp, torch.log, torch.tanh, torch.sin, torch.cos, torch.sqrt, torch.reciprocal, lambda x: x.pow(3), F.relu],
)
def test_functions_that_models_may_call_themselves(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, threads: int
) -> None:
    """What the audit of models calls exact."""
    assert getattr(function, "__name__", "pow").replace("<lambda>", "pow") in _EXACT
    assert measure(function, dtype).exact


@pytest.mark.parametrize("width", [33, 131, 896])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions_along_a_row_do_not_see_other_rows(width: int, dtype: torch.dtype, threads: int) -> None:
    """Norms of hidden states; softmax and its logarithm, as samplers compute them."""
    weight = torch.randn(width, generator=torch.Generator().manual_seed(1)).to(dtype)

    def rms(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight

    rows = torch.randn(144, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    for function in (
        rms,
        lambda x: F.layer_norm(x, (width,), weight, weight),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.log_softmax(x.float(), -1),
        lambda x: x.float().sum(-1),
    ):
        expected = torch.cat([function(row[None]) for row in rows])
        for count in (3, 16, 80, 144):
            assert torch.equal(function(rows[:count]), expected[:count])
