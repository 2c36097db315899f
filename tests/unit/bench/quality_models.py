"""A tiny model with a tokenizer of single characters, in files that a worker could load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models, processors

from tests.unit.worker.model.decoder import models as tiny

if TYPE_CHECKING:
    from pathlib import Path

FRONT = 1
"""The token that the tokenizer puts before a text."""
FIRST = 3
"""Token of the first character, ``!``; those of the others follow."""
VOCABULARY = 99
"""Tokens that it has: the model's others are never sampled, and have no part in probabilities."""


def save(directory: Path, name: str = "llama") -> Path:
    tiny.save(tiny.CONFIGS[name], directory)
    characters = {chr(ord("!") + index): FIRST + index for index in range(94)}
    vocabulary = {"<pad>": 0, "<s>": FRONT, "</s>": 2, **characters, " ": 97, "\n": 98}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", FRONT)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return directory


def ids(text: str) -> list[int]:
    """What it makes of a text without spaces."""
    return [FIRST + ord(character) - ord("!") for character in text]
