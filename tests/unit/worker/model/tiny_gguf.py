"""A tiny Llama as a GGUF file, written with the format's own library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny_model import END, TEMPLATE, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

HEADS, KV_HEADS = 4, 2

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def tiny_llama(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Random weights, the same ones each time; a head of its own, and heads that are grouped."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def write(
    path: Path,
    *,
    words: str = "smollm",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    change: Callable[[dict[str, NDArray[np.float32]]], Any] = lambda tensors: None,
    settings: dict[str, str] | None = None,
) -> LlamaForCausalLM:
    """Writes the file and returns the model whose weights it has. ``change`` may alter the tensors by their names."""
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer)
    tensors = {_name(name): _order(name, weight).numpy() for name, weight in model.state_dict().items()}
    change(tensors)
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, model.config, tokenizer, words)
    for key, value in (settings or {}).items():
        writer.add_string(key, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _describe(writer: gguf.GGUFWriter, config: LlamaConfig, tokenizer: Tokenizer, words: str) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if index < 2 else 1 for _, index in vocabulary])
    writer.add_token_merges(_merges(tokenizer))
    writer.add_eos_token_id(tokenizer.token_to_id(END))
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _merges(tokenizer: Tokenizer) -> list[str]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _name(name: str) -> str:
    for theirs, here in _NAMES.items():
        name = name.replace(theirs, here)
    return name


def _order(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Llama's query and key rows, as the format orders the two halves of a rotated head: interleaved."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return weight
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
