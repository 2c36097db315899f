"""From ``--model`` to files that a worker can load: found, checked, converted once, and described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

Progress = Callable[[str], None]
"""Takes one line of text at a time."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk, ready to load, and all that a gateway needs to serve it."""

    directory: Path
    name: str
    digest: str
    """SHA-256 (hex) of what the weights were made from."""
    tokenizer_json: bytes
    tokenizer_config: bytes
    """JSON; always has ``chat_template`` where the model has one."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a text: from generation_config, config and tokenizer, ascending."""
    vocab_size: int
    """Ids that may be sampled: the smaller of the model's rows and the tokenizer's size with its added tokens."""
    context_length: int
    dtype: torch.dtype
    device: torch.device


def resolve(spec: str, *, cache_dir: Path, dtype: str, device: str, progress: Progress) -> ModelFiles:
    """Finds the model that ``spec`` names and makes it loadable.

    Args:
        spec: a directory of safetensors, a GGUF file, or ``smollm2-135m``.
        cache_dir: where converted weights and digests are kept; safe to share between processes.
        dtype: ``auto``, ``bfloat16`` or ``float32``.
        device: ``auto``, ``cpu`` or ``cuda``.
        progress: told about steps that take time.

    Raises:
        ModelError: with the file or setting that is at fault.
    """
    raise NotImplementedError
