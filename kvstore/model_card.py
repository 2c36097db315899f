"""A model's card: what a gateway needs to serve a model without having its files, and how it is stored."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

from kvstore.errors import MalformedValue

MAX_TOKENIZER_BYTES = 64 * 2**20
"""Longest tokenizer file that is unpacked."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a gateway needs to serve a model without having its files.

    Gateways learn it from the workers, so the two cannot disagree about a tokenizer. What the model is called is said
    by each worker's lease: one fingerprint may be served under several names.
    """

    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    tokenizer_config: bytes
    """JSON: bos_token, eos_token, chat_template, ..."""

    @property
    def tokenizer(self) -> str:
        """SHA-256 of all that turns prompts into token ids, in hex. Unlike the fingerprint it is the same on every
        device."""
        parts = (self.tokenizer_json, self.tokenizer_config)
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


def digest(card: ModelCard) -> bytes:
    """Tells whether two cards are the same."""
    head = json.dumps([card.vocab_size, card.eos_token_ids, len(card.tokenizer_json)])
    return hashlib.sha256(head.encode() + card.tokenizer_json + card.tokenizer_config).hexdigest().encode()


def fields_of(card: ModelCard) -> list[Any]:
    """Names and values as they are stored, but for the digest."""
    return [
        *("vocab_size", card.vocab_size),
        *("eos_token_ids", json.dumps(card.eos_token_ids)),
        *("tokenizer_json", zlib.compress(card.tokenizer_json)),
        *("tokenizer_config", zlib.compress(card.tokenizer_config)),
    ]


def card_of(fingerprint: str, stored: dict[bytes, bytes]) -> ModelCard:
    """Inverse of ``fields_of``. Raises MalformedValue for anything else, and unless the digest matches."""
    try:
        eos_token_ids = json.loads(stored[b"eos_token_ids"])
        if not isinstance(eos_token_ids, list) or not all(type(token) is int for token in eos_token_ids):
            raise ValueError("eos_token_ids are no list of numbers")
        card = ModelCard(
            fingerprint=fingerprint,
            vocab_size=int(stored[b"vocab_size"]),
            eos_token_ids=tuple(eos_token_ids),
            tokenizer_json=_unpack(stored[b"tokenizer_json"]),
            tokenizer_config=_unpack(stored[b"tokenizer_config"]),
        )
    except (KeyError, ValueError, zlib.error) as error:
        raise MalformedValue(f"{type(error).__name__}: {error}") from error
    if digest(card) != stored.get(b"digest"):
        raise MalformedValue("its digest does not match")
    return card


def _unpack(data: bytes) -> bytes:
    """As zlib.decompress, for data that may be a bomb."""
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(data, MAX_TOKENIZER_BYTES)
    if not unpacker.eof:
        raise ValueError("cut off, or too long when unpacked")
    return unpacked
