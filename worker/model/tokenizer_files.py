"""A model's tokenizer as two JSON documents, complete in themselves, however the model's files spread it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from worker.model.errors import ModelDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedConfig

_UNLIMITED = 10**9
"""transformers writes a huge number where a tokenizer has no maximum."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a gateway needs to turn text into ids and back."""

    json: bytes
    """tokenizer.json."""
    config: bytes
    """tokenizer_config.json with special tokens and ``chat_template`` filled in from their own files."""
    size: int
    """One more than the largest id, added tokens included."""
    eos: int | None
    longest: int | None
    """Tokens per text, where the tokenizer has a limit."""


def read(directory: Path) -> TokenizerFiles:
    """The tokenizer of a model directory.

    Raises:
        ModelDamaged: absent, or not readable.
    """
    content = _tokenizer_json(directory)
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:
        raise ModelDamaged(f"{directory}/tokenizer.json: {error}") from error
    config = _object(directory / "tokenizer_config.json")
    for name, token in _object(directory / "special_tokens_map.json").items():
        config.setdefault(name, token)
    template = _chat_template(directory, config)
    if template is not None:
        config["chat_template"] = template
    eos = config.get("eos_token")
    longest = config.get("model_max_length")
    return TokenizerFiles(
        json=content,
        config=json.dumps(config, sort_keys=True, ensure_ascii=False).encode(),
        size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eos=tokenizer.token_to_id(eos["content"] if isinstance(eos, dict) else eos) if eos else None,
        longest=int(longest) if isinstance(longest, int | float) and 0 < longest < _UNLIMITED else None,
    )


def eos_token_ids(directory: Path, config: PreTrainedConfig, tokenizer: TokenizerFiles) -> tuple[int, ...]:
    """Every id that ends a text, whoever says so, ascending."""
    generation = _object(directory / "generation_config.json")
    said = [generation.get("eos_token_id"), config.eos_token_id, tokenizer.eos]
    return tuple(sorted({value for entry in said for value in _integers(entry) if 0 <= value < tokenizer.size}))


def _tokenizer_json(directory: Path) -> bytes:
    path = directory / "tokenizer.json"
    if path.is_file():
        return path.read_bytes()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:
        raise ModelDamaged(f"{directory} has no tokenizer.json, and none could be made: {error}") from error


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """The template from its own file, else from the configuration; of several, the one named default."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _object(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelDamaged(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelDamaged(f"{path} does not hold a JSON object")
    return value


def _integers(value: object) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _integers(part)
