"""Tiny random models of every family that the decoder runs, and of what their configurations can switch on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from worker.model.library import quiet

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 131
CONTEXT = 128
"""Rotations that are scaled have another length than this as their original one."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    **SIZES,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "num_hidden_layers": 3,
    "sliding_window": 19,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
QWEN_WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**{**SIZES, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama head_dim": LlamaConfig(**SIZES, head_dim=20, hidden_act="gelu_pytorch_tanh"),
    "llama llama3": LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3)),
    "llama linear": LlamaConfig(**SIZES, **_rope("linear", factor=3.0)),
    "llama dynamic": LlamaConfig(**SIZES, **_rope("dynamic", factor=2.0)),
    "odd": LlamaConfig(
        **{
            **SIZES,
            "hidden_size": 54,
            "intermediate_size": 33,
            "num_attention_heads": 18,
            "num_key_value_heads": 1,
            "head_dim": 70,
        }
    ),
    "mistral": MistralConfig(**{**SIZES, "num_key_value_heads": 1}, head_dim=24, sliding_window=23),
    "mistral no window": MistralConfig(**SIZES, sliding_window=None, rms_norm_eps=0.01),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
    "smollm3 windows": SmolLM3Config(
        **SIZES, no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=17, attention_bias=True, mlp_bias=True
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 windows": Qwen2Config(**SIZES, **QWEN_WINDOWS),
    "qwen2 yarn": Qwen2Config(**SIZES, rope_parameters=dict(YARN)),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3 biases, windows": Qwen3Config(**SIZES, **QWEN_WINDOWS, head_dim=32, attention_bias=True),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    "gemma2 no caps": Gemma2Config(
        **{**GEMMA, "tie_word_embeddings": False},
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
    ),
    "gemma3": Gemma3TextConfig(**GEMMA),
    "gemma3 scaled": Gemma3TextConfig(
        **GEMMA,
        final_logit_softcapping=4.0,
        attention_bias=True,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=29),
    "phi3 partial": Phi3Config(**SIZES, partial_rotary_factor=0.5),
    "phi3 longrope": Phi3Config(**SIZES, rope_parameters=dict(LONGROPE), original_max_position_embeddings=96),
}


def save(config: PreTrainedConfig, directory: Path, **options: Any) -> Path:
    """A model whose weights are all random, norms and biases too; the same ones each time. ``options`` go to
    ``save_pretrained``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15)
            elif "norm" in name:
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.3))
            else:
                parameter.normal_(0, 0.3)
    with quiet():
        model.save_pretrained(directory, **options)
    return directory


def tokens(count: int) -> list[int]:
    """Random ids."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(5)).tolist()
