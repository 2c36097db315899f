from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.unit.worker.model.decoder import models
from worker.model.decoder.config import DecoderShape, shape_of
from worker.model.decoder.weights import DecoderWeights, read
from worker.model.errors import ModelDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Tensors = dict[str, torch.Tensor]


def shape(name: str) -> DecoderShape:
    return shape_of(models.CONFIGS[name], torch.float32)


def tensors(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def write(tensors: Mapping[str, torch.Tensor], directory: Path) -> Path:
    save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})
    return directory


def test_everything_in_its_place(saved: Callable[[str], Path]) -> None:
    directory = saved("llama biases")
    stored = tensors(directory)
    got = read(directory, shape("llama biases"), torch.float32)
    assert torch.equal(got.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(got.head, stored["lm_head.weight"])
    assert torch.equal(got.final_norm, stored["model.norm.weight"])
    assert len(got.layers) == 2
    for index, layer in enumerate(got.layers):
        at = f"model.layers.{index}."
        assert torch.equal(layer.input_norm, stored[f"{at}input_layernorm.weight"])
        assert torch.equal(layer.mlp_norm, stored[f"{at}post_attention_layernorm.weight"])
        assert torch.equal(layer.qkv, torch.cat([stored[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"]))
        assert layer.qkv_bias is not None
        assert torch.equal(layer.qkv_bias, torch.cat([stored[f"{at}self_attn.{part}_proj.bias"] for part in "qkv"]))
        for name, matrix, bias in (
            ("self_attn.o_proj", layer.output, layer.output_bias),
            ("mlp.gate_proj", layer.gate, layer.gate_bias),
            ("mlp.up_proj", layer.up, layer.up_bias),
            ("mlp.down_proj", layer.down, layer.down_bias),
        ):
            assert torch.equal(matrix, stored[f"{at}{name}.weight"])
            assert bias is not None
            assert torch.equal(bias, stored[f"{at}{name}.bias"])
        assert (layer.q_norm, layer.k_norm, layer.post_attention_norm, layer.post_mlp_norm) == (None,) * 4


def test_norms_of_gemma_have_their_offset(saved: Callable[[str], Path]) -> None:
    directory = saved("gemma3")
    stored = tensors(directory)
    got = read(directory, shape("gemma3"), torch.float32)
    layer, at = got.layers[1], "model.layers.1."
    assert got.head is got.embedding
    for norm, name in (
        (got.final_norm, "model.norm"),
        (layer.input_norm, f"{at}input_layernorm"),
        (layer.post_attention_norm, f"{at}post_attention_layernorm"),
        (layer.mlp_norm, f"{at}pre_feedforward_layernorm"),
        (layer.post_mlp_norm, f"{at}post_feedforward_layernorm"),
        (layer.q_norm, f"{at}self_attn.q_norm"),
        (layer.k_norm, f"{at}self_attn.k_norm"),
    ):
        assert norm is not None
        assert torch.equal(norm, 1 + stored[f"{name}.weight"])


def test_joined_matrices_are_split(saved: Callable[[str], Path]) -> None:
    directory = saved("phi3")
    stored = tensors(directory)
    layer = read(directory, shape("phi3"), torch.float32).layers[0]
    assert torch.equal(layer.qkv, stored["model.layers.0.self_attn.qkv_proj.weight"])
    assert torch.equal(layer.gate, stored["model.layers.0.mlp.gate_up_proj.weight"][:112])
    assert torch.equal(layer.up, stored["model.layers.0.mlp.gate_up_proj.weight"][112:])
    assert layer.gate.is_contiguous()
    assert layer.up.is_contiguous()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(saved: Callable[[str], Path], tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Norms and biases are float32, but of no more digits than the model has."""
    given = {name: tensor.to(stored) for name, tensor in tensors(saved("qwen2")).items()}
    got = read(write(given, tmp_path), shape("qwen2"), dtype)
    layer, at = got.layers[0], "model.layers.0."
    for matrix in (got.embedding, got.head, layer.qkv, layer.output, layer.gate, layer.up, layer.down):
        assert matrix.dtype == dtype
        assert matrix.is_contiguous()
    assert torch.equal(layer.down, given[f"{at}mlp.down_proj.weight"].to(dtype))
    norm, bias = given[f"{at}input_layernorm.weight"], given[f"{at}self_attn.q_proj.bias"]
    assert layer.input_norm.dtype == torch.float32
    assert torch.equal(layer.input_norm, norm.to(dtype).float())
    assert layer.qkv_bias is not None
    assert layer.qkv_bias.dtype == torch.float32
    assert torch.equal(layer.qkv_bias[:96], bias.to(dtype).float())


def equal(left: DecoderWeights, right: DecoderWeights) -> bool:
    pairs = [(left.embedding, right.embedding), (left.head, right.head), (left.final_norm, right.final_norm)]
    for mine, yours in zip(left.layers, right.layers, strict=True):
        pairs += [(getattr(mine, name), getattr(yours, name)) for name in mine.__slots__]
    return all(one is two is None or torch.equal(one, two) for one, two in pairs)


def test_several_files(saved: Callable[[str], Path], tmp_path: Path) -> None:
    models.save(models.CONFIGS["qwen3"], tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # not in the index: not read
    whole = read(saved("qwen3"), shape("qwen3"), torch.float32)
    assert equal(read(tmp_path, shape("qwen3"), torch.float32), whole)


def test_files_saved_without_the_head(saved: Callable[[str], Path], tmp_path: Path) -> None:
    given = {name.removeprefix("model."): tensor for name, tensor in tensors(saved("llama tied")).items()}
    whole = read(saved("llama tied"), shape("llama tied"), torch.float32)
    assert equal(read(write(given, tmp_path), shape("llama tied"), torch.float32), whole)


def test_needless_tensors_of_old_files(saved: Callable[[str], Path], tmp_path: Path) -> None:
    given = tensors(saved("llama")) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert equal(
        read(write(given, tmp_path), shape("llama"), torch.float32), read(saved("llama"), shape("llama"), torch.float32)
    )


class TestTiedHead:
    def test_stored_twice(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        given = tensors(saved("llama tied"))
        given["lm_head.weight"] = given["model.embed_tokens.weight"].clone()
        got = read(write(given, tmp_path), shape("llama tied"), torch.float32)
        assert got.head is got.embedding

    def test_stored_as_the_head(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        given = tensors(saved("llama tied"))
        embedding = given["lm_head.weight"] = given.pop("model.embed_tokens.weight")
        got = read(write(given, tmp_path), shape("llama tied"), torch.float32)
        assert got.head is got.embedding
        assert torch.equal(got.embedding, embedding)

    def test_a_different_one_is_not_tied(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        given = tensors(saved("llama tied"))
        given["lm_head.weight"] = given["model.embed_tokens.weight"] + 1
        got = read(write(given, tmp_path), shape("llama tied"), torch.float32)
        assert torch.equal(got.embedding, given["model.embed_tokens.weight"])
        assert torch.equal(got.head, given["lm_head.weight"])

    def test_missing_everywhere(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        given = tensors(saved("llama tied"))
        del given["model.embed_tokens.weight"]
        with pytest.raises(ModelDamaged, match=r"missing: lm_head\.weight, model\.embed_tokens\.weight"):
            read(write(given, tmp_path), shape("llama tied"), torch.float32)


class TestDamage:
    def refuse(self, directory: Path, name: str, message: str) -> None:
        with pytest.raises(ModelDamaged, match=message):
            read(directory, shape(name), torch.float32)

    @pytest.mark.parametrize(
        ("name", "gone"),
        [
            ("llama", "lm_head.weight"),
            ("llama", "model.layers.1.mlp.up_proj.weight"),
            ("qwen2", "model.layers.0.self_attn.v_proj.bias"),
            ("gemma2", "model.layers.2.post_feedforward_layernorm.weight"),
            ("qwen3", "model.layers.1.self_attn.k_norm.weight"),
            ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ],
    )
    def test_missing(self, saved: Callable[[str], Path], tmp_path: Path, name: str, gone: str) -> None:
        given = tensors(saved(name))
        del given[gone]
        self.refuse(write(given, tmp_path), name, f"missing: {gone}$")

    @pytest.mark.parametrize(
        "more",
        [
            "model.layers.0.self_attn.o_proj.bias",
            "model.layers.2.input_layernorm.weight",
            "model.layers.0.self_attn.q_norm.weight",
            "score.weight",
        ],
    )
    def test_unexpected(self, saved: Callable[[str], Path], tmp_path: Path, more: str) -> None:
        given = tensors(saved("llama")) | {more: torch.zeros(96)}
        self.refuse(write(given, tmp_path), "llama", f"unexpected: {more}$")

    def test_of_another_shape(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        given = tensors(saved("llama"))
        given["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(31, 96)
        self.refuse(
            write(given, tmp_path), "llama", r"mismatched: model\.layers\.0\.self_attn\.k_proj\.weight \[31, 96\]$"
        )

    def test_of_another_kind(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        given = tensors(saved("llama"))
        given["model.norm.weight"] = torch.zeros(96, dtype=torch.int8)
        self.refuse(write(given, tmp_path), "llama", r"unreadable: model\.norm\.weight I8$")

    def test_cut_short(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        whole = (saved("llama") / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[:-1])
        self.refuse(tmp_path, "llama", "can't be read")

    def test_no_files(self, tmp_path: Path) -> None:
        self.refuse(tmp_path, "llama", r"has neither model\.safetensors nor model\.safetensors\.index\.json")

    @pytest.mark.parametrize(
        "index", ["{", "[]", "{}", '{"weight_map": []}', json.dumps({"weight_map": {"a": "gone.safetensors"}})]
    )
    def test_a_broken_index(self, tmp_path: Path, index: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
        self.refuse(tmp_path, "llama", "can't be read")


def test_a_directory_says_all_that_is_needed(saved: Callable[[str], Path]) -> None:
    directory = saved("gemma2 no caps")
    described = shape_of(AutoConfig.from_pretrained(directory), torch.bfloat16)
    got = read(directory, described, torch.bfloat16)
    assert got.head is not got.embedding
    assert got.layers[0].output_bias is not None
