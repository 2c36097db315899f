"""What pages can't give is refused at load, with a reason; nothing is served almost right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, LlamaConfig

from tests.unit.worker.model import tiny
from worker.kernels.linear import RowExactLinear
from worker.model import adapt, hf, swap
from worker.model.errors import ModelDamaged, ModelUnsupported

if TYPE_CHECKING:
    from pathlib import Path

    from worker.model.hf import HfRunner

SIZES = tiny._SIZES
SMALL: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": tiny.VOCAB}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": (SMALL, "0 of 2 layers attend through the attention interface; recurrent"),
    "lfm2": ({**SIZES, "layer_types": ["conv", "full_attention"]}, "1 of 2 layers attend"),
    "bloom": ({**SMALL, "n_head": 6}, "0 of 2 layers attend"),
    "gpt_oss": ({**SIZES, "head_dim": 16, "num_local_experts": 4}, "attention with s_aux is not supported"),
    "llama4_text": (
        {**SIZES, "head_dim": 16, "attention_chunk_size": 32, "num_local_experts": 2},
        "a mask unlike its sliding window",
    ),
    "stablelm": (SIZES, "does not pass its arguments on to attention"),
    "deepseek_v3": (
        {**SIZES, "num_key_value_heads": 6, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 4, "first_k_dense_replace": 2, "n_routed_experts": 4},
        "attention over shapes",
    ),
}


def load(directory: Path, **changes: Any) -> HfRunner:
    files = tiny.files(directory, torch.float32, **changes)
    return hf.load(files, num_blocks=8, block_size=16, progress=lambda _: None)


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_pages_cannot_serve_are_refused(kind: str, tmp_path: Path) -> None:
    sizes, reason = REFUSED[kind]
    tiny.save(AutoConfig.for_model(kind, **sizes), tmp_path)
    with pytest.raises(ModelUnsupported, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5", "t5: encoder-decoder models can't run on pages"),
        ("clip_text_model", "clip_text_model: not a causal language"),
    ],
)
def test_models_of_another_kind_are_refused(kind: str, reason: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["phi3", "olmo2", "gpt_neox", "cohere2"])
def test_other_families_run_unchanged(kind: str, tmp_path: Path) -> None:
    tiny.save(AutoConfig.for_model(kind, **{**SIZES, "sliding_window": 40}), tmp_path)
    ids = tiny.tokens(100)
    text = tiny.feed(tiny.runner(tmp_path, torch.float32), tiny.Text(ids, list(range(7))), 13, 1, 40)
    expected = tiny.eager(tmp_path, ids)
    for length, logits in text.logits.items():
        assert float((logits - expected[length - 1]).norm() / expected[length - 1].norm()) < 1e-4


def test_attention_that_gives_other_logits_is_refused(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(module: nn.Module, *given: Any, **options: Any) -> Any:
        result, _ = original(module, *given, **options)
        return result.roll(1, -1), None

    original = adapt._paged
    monkeypatch.setattr(adapt, "_paged", shifted)
    with pytest.raises(ModelUnsupported, match=r"other logits than transformers' own \(relative difference"):
        load(models["llama"])
    monkeypatch.undo()
    adapt.register()


class TestWeights:
    """Every tensor is accounted for."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tiny.save(tiny.CONFIGS["llama"], tmp_path)

    def rewrite(self, directory: Path, change: Any) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def test_a_missing_tensor(self, directory: Path) -> None:
        self.rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ModelDamaged, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
            load(directory)

    def test_a_renamed_tensor(self, directory: Path) -> None:
        def rename(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")

        self.rewrite(directory, rename)
        with pytest.raises(ModelDamaged, match=r"missing: .*gate_proj.*; unexpected: .*mlp\.gate\.weight"):
            load(directory)

    def test_a_tensor_of_another_shape(self, directory: Path) -> None:
        self.rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
        with pytest.raises(ModelDamaged, match=r"mismatched: .*model\.norm\.weight"):
            load(directory)

    def test_a_file_cut_short(self, directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ModelDamaged, match=r"the weights in .* can't be read"):
            load(directory)

    def test_a_file_that_is_gone(self, directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        with pytest.raises(ModelDamaged, match=r"the weights in .* can't be read"):
            load(directory)

    def test_a_configuration_that_is_not_json(self, directory: Path) -> None:
        (directory / "config.json").write_text("{")
        with pytest.raises(ModelDamaged, match=r"config\.json"):
            load(directory)


class TestSwaps:
    """What takes the place of the library's modules."""

    def test_all_products_are_row_exact(self, models: dict[str, Path]) -> None:
        for family, count in (("gpt2", 9), ("llama", 15)):
            model = load(models[family]).model
            assert sum(isinstance(module, RowExactLinear) for module in model.modules()) == count
            assert not any(type(module) is nn.Linear for module in model.modules())

    def test_rotary_tables_hold_what_the_library_computes(self) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        source = LlamaRotaryEmbedding(LlamaConfig(**SIZES))
        x, positions = torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([[5, 0, 511, 5]])
        table = swap.RotaryTable(source, 512)
        for ours, theirs in zip(table(x, positions), source(x, positions), strict=True):
            assert ours.dtype == torch.bfloat16
            assert torch.equal(ours, theirs)

    def test_rotary_embeddings_of_another_kind_are_refused(self) -> None:
        class Complex(nn.Module):
            def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
                return torch.polar(torch.ones(1), torch.ones(1))

        with pytest.raises(ModelUnsupported, match="Complex: rotary embeddings other than"):
            swap.RotaryTable(Complex(), 8)(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64))


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mistral", **{**SIZES, "sliding_window": tiny.CONTEXT})
    assert load(tiny.save(config, tmp_path)).attention.layers[0].window == 0
