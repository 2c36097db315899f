"""Tiny random models of several families, saved as real files, and texts run through them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from worker.kernels.native.library import best
from worker.model import hf
from worker.model.decoder import runner as decoder
from worker.model.library import quiet
from worker.model.loader import ModelFiles
from worker.step import StepRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from worker.step import Runner

VOCAB = 131
CONTEXT = 512
BLOCK = 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA: dict[str, Any] = {"head_dim": 24, "query_pre_attn_scalar": 24, "num_hidden_layers": 2}
_LAYERS = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=48,
        n_layer=2,
        n_head=4,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": LlamaConfig(**_SIZES),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen3": Qwen3Config(**{**_SIZES, "head_dim": 32}),
    "mistral": MistralConfig(**{**_SIZES, "sliding_window": 40, "num_key_value_heads": 1}),
    "gemma2": Gemma2Config(**{**_SIZES, **_GEMMA, "sliding_window": 37, "layer_types": _LAYERS}),
    "gemma3": Gemma3TextConfig(**{**_SIZES, **_GEMMA, "sliding_window": 33, "layer_types": _LAYERS}),
}


def save(config: PreTrainedConfig, directory: Path) -> Path:
    """A model with random weights, the same ones each time."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    with quiet():
        model.save_pretrained(directory)
    return directory


def files(directory: Path, dtype: torch.dtype, **changes: Any) -> ModelFiles:
    """As `loader.resolve` would describe it, without a tokenizer."""
    fields: dict[str, Any] = {
        "directory": directory,
        "name": "tiny",
        "digest": "0" * 64,
        "tokenizer_json": b"{}",
        "tokenizer_config": b"{}",
        "eos_token_ids": (2,),
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "dtype": dtype,
        "device": torch.device("cpu"),
    }
    return ModelFiles(**{**fields, **changes})


def runner(directory: Path, dtype: torch.dtype, *, num_blocks: int = 160, block_size: int = BLOCK) -> hf.HfRunner:
    """The model on pages that all hold NaN."""
    made = hf.load(files(directory, dtype), num_blocks=num_blocks, block_size=block_size, progress=lambda _: None)
    poison(made)
    return made


def fused(
    directory: Path,
    dtype: torch.dtype,
    *,
    num_blocks: int = 160,
    block_size: int = BLOCK,
    context: int = CONTEXT,
    eight_bit_pages: bool = False,
) -> decoder.DecoderRunner:
    """The model by the fused decoder, on pages that all hold NaN."""
    native = best(2)
    assert native is not None
    described = files(directory, dtype, context_length=context)
    made = decoder.load(
        described,
        native,
        num_blocks=num_blocks,
        block_size=block_size,
        eight_bit_pages=eight_bit_pages,
        progress=lambda _: None,
    )
    poison(made)
    return made


def poison(made: hf.HfRunner | decoder.DecoderRunner) -> None:
    """Fills every block that a sequence may get with NaN."""
    if isinstance(made, decoder.DecoderRunner):
        poison_blocks(made, slice(None))
        return
    for pages in made.attention.pages:
        pages[: made.num_blocks] = torch.nan


def poison_blocks(made: decoder.DecoderRunner, blocks: slice | list[int]) -> None:
    """Makes all bits of these blocks ones: NaN as bfloat16 and as float32, also as a scale."""
    made.model.pages.view(torch.uint8)[:, blocks] = 0xFF


def eager(directory: Path, ids: Sequence[int]) -> torch.Tensor:
    """transformers' own logits in float32, ``[tokens, vocab]``."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random ids."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Text:
    """A sequence that goes through a runner piece by piece; ``logits[n]`` are those after ``n`` tokens."""

    ids: list[int]
    table: list[int]
    done: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def next(self, count: int, logits: int = 1) -> StepRow:
        """The row that computes so many more tokens, and gives the logits after so many of them."""
        return StepRow(self.ids[self.done : self.done + count], self.done, self.table, logits)


def step(made: Runner, *share: tuple[Text, int]) -> None:
    """Runs so many next tokens of each text in one step."""
    logits = made.forward([text.next(count) for text, count in share])
    assert logits.shape == (len(share), made.vocab_size)
    assert logits.dtype == torch.float32
    for (text, count), row in zip(share, logits, strict=True):
        text.done += count
        text.logits[text.done] = row.clone()  # logits hold until the next call


def feed(made: Runner, text: Text, *pieces: int) -> Text:
    """Runs what is left of a text alone, in these pieces; the rest in one."""
    for count in (*pieces, len(text.ids) - text.done - sum(pieces)):
        if count:
            step(made, (text, count))
    return text
