"""Whatever would depend on a token's neighbours is swapped, or said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import AutoConfig

from tests.unit.worker.model import tiny
from tests.unit.worker.model.tiny import CONFIGS, Text
from worker.kernels import elementwise, products
from worker.kernels.elementwise import RowExactActivation
from worker.kernels.linear import RowExactLinear, RowExactWeight
from worker.model import hf, swap
from worker.model.audit import Audit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Loaded = Callable[[str, torch.dtype], hf.HfRunner]

DTYPES = (torch.float32, torch.bfloat16)
FAMILIES = pytest.mark.parametrize("family", CONFIGS)

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 52},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
}


@FAMILIES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_family_leaves_a_doubt(family: str, dtype: torch.dtype, loaded: Loaded) -> None:
    runner = loaded(family, dtype)
    assert runner.doubts == ()
    assert sum(isinstance(module, RowExactActivation) for module in runner.model.modules()) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", EXPERTS)
def test_mixtures_of_experts_keep_their_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Though an expert's rows are as many as the tokens that happen to choose it."""
    config = AutoConfig.for_model(kind, **{**tiny._SIZES, **EXPERTS[kind]})
    runner, ids = tiny.runner(tiny.save(config, tmp_path), dtype), tiny.tokens(60)
    assert runner.doubts == ()
    alone = tiny.feed(runner, Text(ids, [0, 1, 2, 3]), *[1] * 20)
    whole = tiny.feed(runner, Text(ids, [4, 5, 6, 7]))
    mixed, near = (
        Text(ids, [8, 9, 10, 11]),
        [Text(tiny.tokens(50, seed), [20 + 4 * seed + i for i in range(4)]) for seed in range(9)],
    )
    tiny.step(runner, *((text, 3 + 5 * index) for index, text in enumerate(near)), (mixed, 37))
    tiny.step(runner, (mixed, 23), *((text, 1) for text in near))
    assert torch.equal(whole.logits[60], alone.logits[60])
    assert torch.equal(mixed.logits[60], alone.logits[60])
    if dtype == torch.float32:
        expected = tiny.eager(tmp_path, ids)[59]
        assert float((whole.logits[60] - expected).norm() / expected.norm()) < 1e-4


def test_what_stays_the_models_own_is_told(tmp_path: Path) -> None:
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 52,
        "shared_expert_intermediate_size": 52,
    }
    config = AutoConfig.for_model("qwen2_moe", **{**tiny._SIZES, **sizes})
    lines: list[str] = []
    files = tiny.files(tiny.save(config, tmp_path), torch.float32)
    runner = hf.load(files, num_blocks=4, block_size=16, progress=lines.append)
    assert runner.doubts == ("the model computes sigmoid by itself",)
    assert "a token's bits may depend on its neighbours: the model computes sigmoid by itself" in lines


class Odd(nn.Module):
    """Computes a bit of everything, some of it in modules that get swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.up = nn.Linear(8, 8)
        self.scores = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.act(self.up(x)), self.scores)


class TestAudit:
    """What is found in a forward pass."""

    def found(self, model: nn.Module, *given: torch.Tensor) -> set[str]:
        with torch.inference_mode(), Audit(model) as audit:
            model(*given)
        return audit.found

    def of(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> set[str]:
        with torch.inference_mode(), Audit(nn.Identity()) as audit:
            function(x)
        return audit.found

    def test_swapped_modules_are_trusted_and_no_others(self) -> None:
        model = Odd()
        assert self.found(model, torch.randn(4, 8)) == {"linear", "silu"}
        model.up = RowExactLinear(model.up.weight, model.up.bias)  # type: ignore[assignment]
        model.act = RowExactActivation(model.act)  # type: ignore[assignment]
        assert self.found(model, torch.randn(4, 8)) == {"linear"}
        weight = RowExactWeight.wrap(model.scores)
        del model._parameters["scores"]
        model.scores = weight  # type: ignore[assignment]
        assert self.found(model, torch.randn(4, 8)) == set()

    @pytest.mark.parametrize(
        ("function", "found"),
        [
            (lambda x: x + 2 * x, set()),
            (lambda x: torch.add(x, x, alpha=2), {"add"}),
            (lambda x: x.pow(3) + x.pow(0.5), set()),
            (lambda x: x.pow(2.5), {"pow"}),
            (lambda x: torch.rsqrt(x), set()),
            (lambda x: torch.rsqrt(x.bfloat16()), {"rsqrt"}),
            (lambda x: x @ x.T, {"matmul"}),
            (lambda x: F.softmax(x, -1), set()),
            (lambda x: F.gelu(x) * torch.sigmoid(x), {"gelu", "sigmoid"}),
        ],
    )
    def test_operations(self, function: Callable[[torch.Tensor], torch.Tensor], found: set[str]) -> None:
        assert self.of(function, torch.rand(4, 8)) == found

    def test_its_hooks_go_with_it(self) -> None:
        layer = RowExactActivation(nn.SiLU())
        self.found(layer, torch.randn(4, 8))
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks


def test_a_step_is_padded_for_the_tiles_that_all_products_have(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = products.choose

    def few(shape: tuple[int, int], dtype: torch.dtype, *, bias: bool, lean: bool = False) -> products.Recipe:
        recipe = real(shape, dtype, bias=bias, lean=lean)
        return recipe._replace(tiles=(32, 16) if shape[0] == 112 else (64, 16) if shape[1] == 112 else recipe.tiles)

    monkeypatch.setattr("worker.kernels.linear.choose", few)
    runner = tiny.runner(models["llama"], torch.float32)
    assert runner.attention.tiles == (16,)
    assert runner.attention.plan([Text(tiny.tokens(33), [0, 1, 2]).next(33)]).tokens == 48


class TestFingerprint:
    """It tells apart what is computed, whatever the reason."""

    def test_other_results_of_a_measurement(self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        before = tiny.runner(models["llama"], torch.float32).fingerprint
        monkeypatch.setattr(elementwise, "measure", lambda *_: elementwise.Measured(True, "other"))
        assert tiny.runner(models["llama"], torch.float32).fingerprint != before

    def test_other_logits(self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing measured differs: only what the model makes of it all."""
        before = tiny.runner(models["llama"], torch.float32).fingerprint
        forward = RowExactLinear.forward
        monkeypatch.setattr(RowExactLinear, "forward", lambda self, x: forward(self, x) * (1 + 2**-22))
        assert tiny.runner(models["llama"], torch.float32).fingerprint != before

    def test_a_measurement_that_failed_is_a_doubt(
        self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(elementwise, "measure", lambda *_: elementwise.Measured(False, ""))
        recipe = products.Recipe("plain", (16,), False, "", 1.0, 1.0)
        monkeypatch.setattr("worker.kernels.linear.choose", lambda *_, **__: recipe)
        doubts = tiny.runner(models["gpt2"], torch.float32).doubts
        assert "NewGELUActivation(): a result's bits depend on its place" in doubts
        assert "products 48>144 plain: a row's bits depend on its place" in doubts


def test_activations_of_the_library_are_known() -> None:
    assert {nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh} <= swap.ACTIVATIONS
