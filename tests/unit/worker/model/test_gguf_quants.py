"""Quantized GGUF files, heads that are grouped eight to one, and tokenizers: what the file says is what is served.

Comments such as K01 name the public fault reports of other servers that a test guards against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf as format_library
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.worker.model import tiny, tiny_gguf
from worker.model import hf, loader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from worker.model.loader import ModelFiles

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

SUPER = 256
"""Weights in a block of the K kinds."""

# The format's own library reads the K kinds, but does not write them. Here they are from the format's description; each
# function takes rows of weights and gives the bytes, and the weights that these bytes stand for.


def q4_k(weights: Floats) -> tuple[Bytes, Floats]:
    """Eight parts of 32: 4 bits for each weight, 6 for each part's scale and minimum, half floats to scale those."""
    parts = weights.reshape(-1, 8, 32)
    low = np.minimum(parts.min(-1), 0)
    scale = (parts.max(-1) - low) / 15
    unit, unit_low = half(scale.max(-1) / 63), half(-low.min(-1) / 63)
    scales = np.clip(np.round(scale / unit), 1, 63).astype(np.uint8)
    lows = np.clip(np.round(-low / unit_low), 0, 63).astype(np.uint8)
    step, shift = (unit * scales)[..., None], (unit_low * lows)[..., None]
    q = np.clip(np.round((parts + shift) / step), 0, 15).astype(np.uint8)
    head = [unit.astype(np.float16).view(np.uint8), unit_low.astype(np.float16).view(np.uint8)]
    first = [six[:, :4] | six[:, 4:] >> 4 << 6 for six in (scales, lows)]
    packed = [*head, *first, scales[:, 4:] & 15 | (lows[:, 4:] & 15) << 4]
    nibbles = (q[:, ::2] | q[:, 1::2] << 4).reshape(-1, 128)
    return joined(weights, *packed, nibbles), (step * q - shift).astype(np.float32).reshape(weights.shape)


def q6_k(weights: Floats) -> tuple[Bytes, Floats]:
    """Sixteen parts of 16: 6 bits for each weight, 8 for each part's scale, a half float to scale those."""
    parts = weights.reshape(-1, 16, 16)
    scale = np.abs(parts).max(-1) / 31
    unit = half(scale.max(-1) / 127)
    scales = np.clip(np.round(scale / unit), 1, 127).astype(np.int8)
    step = (unit * scales)[..., None]
    q = np.clip(np.round(parts / step), -32, 31)
    six = (q + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # two halves of four runs of 32
    low = np.concatenate([six[:, :, run] & 15 | (six[:, :, run + 2] & 15) << 4 for run in (0, 1)], -1)
    high = six[:, :, 0] >> 4 | six[:, :, 1] >> 4 << 2 | six[:, :, 2] >> 4 << 4 | six[:, :, 3] >> 4 << 6
    packed = [low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), unit.astype(np.float16).view(np.uint8)]
    return joined(weights, *packed), (step * q).astype(np.float32).reshape(weights.shape)


def half(values: Floats) -> Floats:
    """``[blocks]`` to ``[blocks, 1]``, rounded to what a half float can hold."""
    return np.maximum(values, 1e-6).astype(np.float16).astype(np.float32)[:, None]


def joined(weights: Floats, *parts: Bytes) -> Bytes:
    return np.concatenate(parts, -1).reshape(weights.shape[0], -1)


def by_the_library(kind: str) -> Callable[[Floats], tuple[Bytes, Floats]]:
    def pack(weights: Floats) -> tuple[Bytes, Floats]:
        packed = quantize(weights, format_library.GGMLQuantizationType[kind])
        return packed, dequantize(packed, format_library.GGMLQuantizationType[kind])

    return pack


PACKERS = {"Q4_0": by_the_library("Q4_0"), "Q8_0": by_the_library("Q8_0"), "Q4_K": q4_k, "Q6_K": q6_k}


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on ``tiny_gguf`` writes a model with 16 heads on 2, and rows of one block of the K kinds."""

    def model(tokenizer: Tokenizer) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=SUPER,
            intermediate_size=SUPER,
            num_hidden_layers=2,
            num_attention_heads=16,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.03,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=0,
        )
        return LlamaForCausalLM(config)

    monkeypatch.setattr(tiny_gguf, "tiny_llama", model)
    monkeypatch.setattr(tiny_gguf, "HEADS", 16)
    monkeypatch.setattr(tiny_gguf, "KV_HEADS", 2)


def resolve(path: Path, tmp_path: Path) -> ModelFiles:
    cache = tmp_path / "cache"
    return loader.resolve(str(path), cache_dir=cache, dtype="float32", device="cpu", progress=lambda _: None)


def served(files: ModelFiles, ids: list[int]) -> torch.Tensor:
    """Logits after the last of the tokens, from the pages of the runner that would serve them."""
    runner = hf.load(files, num_blocks=8, block_size=16, progress=lambda _: None)
    return tiny.feed(runner, tiny.Text(ids, list(range(8))), 7, 1).logits[len(ids)]


def reference(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_eight_heads_to_one_are_put_in_order(grouped: None, tmp_path: Path) -> None:
    """K03: logits are those of the model that the file was made from; with rows in another order they would not be."""
    model = tiny_gguf.write(tmp_path / "tiny.gguf")
    ids = tiny.tokens(100)
    expected = reference(model, ids)
    assert relative(served(resolve(tmp_path / "tiny.gguf", tmp_path), ids), expected) < 1e-4
    for layer in model.model.layers:
        weight = layer.self_attn.k_proj.weight
        weight.data = tiny_gguf._order("k_proj", weight.data)
    assert relative(reference(model, ids), expected) > 0.01


@pytest.mark.parametrize(("kind", "far"), [("Q8_0", 0.03), ("Q6_K", 0.1), ("Q4_K", 0.4), ("Q4_0", 0.4)])
def test_quantized_weights_are_what_their_bytes_stand_for(
    kind: str, far: float, grouped: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K01: exactly, and so are the logits; those of the original are as near as so few bits allow."""
    pack = PACKERS[kind]
    with monkeypatch.context() as patched:
        patched.setattr(format_library.quants, "quantize", lambda weights, _: pack(weights)[0])
        model = tiny_gguf.write(tmp_path / "tiny.gguf", kind=format_library.GGMLQuantizationType[kind])
    ids = tiny.tokens(60)
    original = reference(model, ids)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = torch.from_numpy(pack(parameter.detach().numpy())[1])
    files = resolve(tmp_path / "tiny.gguf", tmp_path)
    found = load_file(files.directory / "model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.allclose(found[name], weight, rtol=1e-5, atol=1e-6), name
    logits = served(files, ids)
    assert relative(logits, reference(model, ids)) < 1e-4
    assert 0 < relative(logits, original) < far
