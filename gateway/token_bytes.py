"""What single tokens say: bytes, as a character may span tokens."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from gateway.text_bound import byte_letters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class TokenBytes:
    """The bytes of each token of a vocabulary; of control tokens their names. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # As it is pickled: its part of tokenizer.json, without the vocabulary's megabytes.
        decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        steps: list[dict[str, Any]] = decoder.get("decoders", [decoder] if decoder else [])
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._letters = byte_letters() if any(step["type"] == "ByteLevel" for step in steps) else None
        self._replaced = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]

    def __getitem__(self, token_id: int) -> bytes:
        """Of an id that no token has: nothing."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._letters is not None:
            letters = [self._letters.get(letter) for letter in piece]
            return piece.encode() if None in letters else bytes(letters)  # type: ignore[arg-type]
        for old, new in self._replaced:
            piece = piece.replace(old, new)
        return bytes([int(piece[3:5], 16)]) if _BYTE.fullmatch(piece) else piece.encode()
