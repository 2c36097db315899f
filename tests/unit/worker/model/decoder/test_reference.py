"""The reference, fed with what we make of a directory, computes what the library's own models compute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.worker.model import tiny
from tests.unit.worker.model.decoder import models, reference
from worker.model.decoder.config import DecoderShape, rotary_tables, shape_of
from worker.model.decoder.weights import DecoderWeights, read
from worker.model.library import quiet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Made = tuple[DecoderShape, tuple[reference.Table, ...], DecoderWeights]

TEXT = models.tokens(96)
"""Longer than every window and, but for longrope, than what scaled rotations take as the original length."""


def made(directory: Path, dtype: torch.dtype) -> Made:
    config = AutoConfig.from_pretrained(directory)
    shape = shape_of(config, dtype)
    return shape, rotary_tables(config, shape, len(TEXT)), read(directory, shape, dtype)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_logits_are_those_of_the_library(saved: Callable[[str], Path], name: str) -> None:
    directory = saved(name)
    ours = reference.logits(*made(directory, torch.float32), TEXT)
    assert ours.shape == (len(TEXT), models.VOCAB)
    torch.testing.assert_close(ours, tiny.eager(directory, TEXT), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama biases", "smollm3", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_rounded_logits_are_as_near_as_the_library_s_own(saved: Callable[[str], Path], name: str) -> None:
    """Both differ from float32 by as much, within a quarter: what is rounded where is not quite the same."""
    directory = saved(name)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0].float()
    ours = reference.logits(*made(directory, torch.bfloat16), TEXT, round_to=torch.bfloat16)
    exact = tiny.eager(directory, TEXT)
    assert 0 < (ours - exact).norm() < 1.25 * (theirs - exact).norm()


@pytest.mark.parametrize("name", models.CONFIGS)
def test_rotary_tables_have_the_bits_of_the_library(saved: Callable[[str], Path], name: str) -> None:
    directory = saved(name)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    shape, tables, _ = made(directory, torch.float32)
    assert len(tables) == len(shape.ropes)
    for kind, table in zip(shape.ropes, tables, strict=True):
        given = model.model.rotary_emb(torch.zeros(1), torch.arange(len(TEXT))[None], *([kind] if kind else []))
        for ours, theirs in zip(table, given, strict=True):
            assert ours.shape == (len(TEXT), shape.rotary_dim // 2)
            assert torch.equal(torch.cat((ours, ours), dim=-1), theirs[0])


def _without_windows(shape: DecoderShape) -> dict[str, Any]:
    return {"layers": tuple(replace(layer, window=0) for layer in shape.layers)}


def _wider_windows(shape: DecoderShape) -> dict[str, Any]:
    return {"layers": tuple(replace(layer, window=layer.window and layer.window + 1) for layer in shape.layers)}


def _rotated_everywhere(shape: DecoderShape) -> dict[str, Any]:
    return {"layers": tuple(replace(layer, rope=0) for layer in shape.layers)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", _without_windows),
        ("mistral", _wider_windows),
        ("mistral no window", lambda _: {"norm_eps": 1e-6}),
        ("phi3", _wider_windows),
        ("qwen2 windows", _without_windows),
        ("smollm3", _rotated_everywhere),
        ("smollm3 windows", _wider_windows),
        ("gemma2", lambda _: {"attention_softcap": 0.0}),
        ("gemma2", lambda _: {"logit_softcap": 0.0}),
        ("gemma2", lambda _: {"attention_scale": 24**-0.5}),
        ("gemma2", lambda _: {"activation": "silu"}),
        ("gemma3", lambda _: {"embed_scale": 1.0}),
        ("gemma3", _wider_windows),
        ("gemma3", _rotated_everywhere),
    ],
)
def test_these_texts_show_the_difference(
    saved: Callable[[str], Path], name: str, change: Callable[[DecoderShape], dict[str, Any]]
) -> None:
    """Each setting changes the logits by far more than what counts as equal."""
    shape, tables, weights = made(saved(name), torch.float32)
    right = reference.logits(shape, tables, weights, TEXT)
    wrong = reference.logits(replace(shape, **change(shape)), tables, weights, TEXT)
    assert (right - wrong).abs().max() > 1e-2
