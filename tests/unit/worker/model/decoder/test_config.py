from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tests.unit.worker.model.decoder import models
from tests.unit.worker.model.decoder.models import GEMMA, LONGROPE, QWEN_WINDOWS, SIZES
from worker.model.decoder.config import DecoderShape, LayerShape, NotFused, rotary_tables, shape_of


def shape(name: str, dtype: torch.dtype = torch.float32) -> DecoderShape:
    return shape_of(models.CONFIGS[name], dtype)


def test_a_whole_description() -> None:
    assert shape("gemma3 scaled", torch.bfloat16) == DecoderShape(
        family="gemma3_text",
        vocab=131,
        hidden=96,
        heads=6,
        kv_heads=2,
        head_dim=24,
        intermediate=112,
        norm_eps=1e-6,
        norm_offset=1.0,
        activation="gelu_tanh",
        embed_scale=9.8125,
        attention_scale=40**-0.5,
        attention_softcap=0.0,
        logit_softcap=4.0,
        qk_norm=True,
        sandwich=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=False,
        rotary_dim=24,
        ropes=("full_attention", "sliding_attention"),
        layers=(LayerShape(window=19, rope=1), LayerShape(window=0, rope=0), LayerShape(window=19, rope=1)),
        tied=True,
    )


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 9.8125), (torch.float32, 9.797959327697754)])
def test_the_embedding_s_scale_is_rounded_to_the_model_s_dtype(dtype: torch.dtype, scale: float) -> None:
    assert shape("gemma2", dtype).embed_scale == scale
    assert shape("llama", dtype).embed_scale == 1.0


@pytest.mark.parametrize(
    ("name", "biases"),
    [
        ("llama", (False, False, False)),
        ("llama biases", (True, True, True)),
        ("qwen2", (True, False, False)),
        ("qwen3 biases, windows", (True, True, False)),
        ("phi3", (False, False, False)),
    ],
)
def test_biases(name: str, biases: tuple[bool, bool, bool]) -> None:
    described = shape(name)
    assert (described.qkv_bias, described.output_bias, described.mlp_bias) == biases


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", (0, 0)),
        ("mistral", (23, 23)),
        ("mistral no window", (0, 0)),
        ("smollm3 windows", (17, 0)),
        ("qwen2", (0, 0)),
        ("qwen2 windows", (0, 21)),
        ("qwen3 biases, windows", (0, 21)),
        ("gemma2", (19, 0, 19)),
        ("phi3", (29, 29)),
    ],
)
def test_windows(name: str, windows: tuple[int, ...]) -> None:
    assert tuple(layer.window for layer in shape(name).layers) == windows


def test_layers_without_rotation() -> None:
    assert [layer.rope for layer in shape("smollm3").layers] == [0, -1]


def test_sizes_that_differ_from_the_usual() -> None:
    assert shape("llama head_dim").head_dim == 20
    assert shape("llama head_dim").activation == "gelu_tanh"
    assert shape("phi3 partial").rotary_dim == 8
    assert shape("phi3 longrope").rotary_dim == 12
    assert (shape("mistral").kv_heads, shape("mistral").heads) == (1, 6)
    assert shape("qwen3").attention_scale == 32**-0.5


def changed(config: PreTrainedConfig, **values: Any) -> PreTrainedConfig:
    """With settings that its constructor would refuse or put right, or that it doesn't know."""
    for name, value in values.items():
        config.__dict__[name] = value
    return config


LLAMA_TYPES = ["full_attention", "full_attention"]

REFUSED: list[tuple[PreTrainedConfig, str]] = [
    (GPT2Config(), "model_type 'gpt2'"),
    (MixtralConfig(), "model_type 'mixtral'"),
    (Gemma3Config(), "model_type 'gemma3'"),
    (LlamaConfig(**SIZES, hidden_act="relu"), "hidden_act 'relu'"),
    (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act 'gelu'"),
    (Gemma2Config(**GEMMA, hidden_activation="gelu"), "hidden_activation 'gelu'"),
    (LlamaConfig(**{**SIZES, "num_key_value_heads": 4}), "num_key_value_heads 4"),
    (LlamaConfig(**SIZES, quantization_config={"quant_method": "fp8"}), "quantization_config {'quant_method': 'fp8'}"),
    (changed(LlamaConfig(**SIZES), transformers_weights="a.safetensors"), "transformers_weights 'a.safetensors'"),
    (LlamaConfig(**SIZES, is_causal=False), "is_causal False"),
    (LlamaConfig(**SIZES, per_layer_config={0: {"num_key_value_heads": 1}}), "per_layer_config"),
    (LlamaConfig(**SIZES, layer_types=LLAMA_TYPES), "layer_types ['full_attention', 'full_attention']"),
    (MistralConfig(**SIZES, layer_types=LLAMA_TYPES), "layer_types ['full_attention', 'full_attention']"),
    (MistralConfig(**SIZES, sliding_window=0), "sliding_window 0"),
    (Qwen2Config(**SIZES, layer_types=["full_attention", "sliding_attention"]), "sliding_window None"),
    (Qwen3Config(**SIZES, layer_types=["full_attention", "chunked_attention"]), "'chunked_attention'"),
    (changed(Qwen2Config(**SIZES, **QWEN_WINDOWS), layer_types=["full_attention"]), "layer_types ['full_attention']"),
    (
        SmolLM3Config(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "use_sliding_window",
    ),
    (changed(SmolLM3Config(**SIZES), no_rope_layers=[1]), "no_rope_layers [1]"),
    (Gemma2Config(**GEMMA, use_bidirectional_attention=True), "use_bidirectional_attention True"),
    (Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True), "use_bidirectional_attention True"),
    (Gemma2Config(**GEMMA, attn_logit_softcapping=0.0), "attn_logit_softcapping 0.0"),
    (Gemma2Config(**GEMMA, final_logit_softcapping=-1.0), "final_logit_softcapping -1.0"),
    (Gemma3TextConfig(**GEMMA, attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0"),
    (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}),
        "rope_type 'proportional'",
    ),
    (changed(LlamaConfig(**SIZES), rope_parameters={"rope_type": "newest"}), "rope_type 'newest'"),
    (changed(LlamaConfig(**SIZES), rope_parameters=None), "rope_parameters None"),
    (
        changed(Qwen3Config(**SIZES), rope_parameters={"full_attention": {"rope_type": "default"}}),
        "rope_parameters {'full_attention'",
    ),
    (
        changed(
            Gemma3TextConfig(**GEMMA),
            rope_parameters={"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        ),
        "rope_parameters.full_attention None",
    ),
    (LlamaConfig(**SIZES, partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (Phi3Config(**SIZES, partial_rotary_factor=0.6), "9 numbers to rotate in a head of 16"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[f"{each[0].model_type}: {each[1]}" for each in REFUSED])
def test_what_is_not_described_is_refused(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(NotFused) as refused:
        shape_of(config, torch.float32)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (models.CONFIGS["llama dynamic"], 128),
        (Phi3Config(**SIZES, rope_parameters=dict(LONGROPE), original_max_position_embeddings=64), 64),
    ],
    ids=["dynamic", "longrope"],
)
def test_rotations_that_move_are_made_only_while_they_stand(config: PreTrainedConfig, longest: int) -> None:
    described = shape_of(config, torch.float32)
    [(cos, sin)] = rotary_tables(config, described, longest)
    assert cos.shape == sin.shape == (longest, described.rotary_dim // 2)
    with pytest.raises(NotFused, match=f"no constant frequencies for {longest + 1} positions"):
        rotary_tables(config, described, longest + 1)


def test_tables_hold_the_attention_factor() -> None:
    """YaRN's is 0.1 ln(factor) + 1; position 0 is not turned, so its cosines are just that."""
    config = models.CONFIGS["qwen2 yarn"]
    [(cos, sin)] = rotary_tables(config, shape_of(config, torch.bfloat16), 5)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[0], torch.full((8,), 1.1386294))
    assert not sin[0].any()
