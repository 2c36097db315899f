"""How much text can at all fit into a context: what is longer need not be tokenized to be refused.

``bound_of`` tells how many UTF-8 bytes of text one token can stand for at most. That is the longest token, if every
byte of the text ends up in some token; a tokenizer that may drop, shorten or lump together text has no bound. Only
parts that are known not to do so are let through, so a text that could fit is never refused::

    normalizers      those that add text, or replace a literal by one that is no shorter; NFC, see NFC_SHRINKS
    pre-tokenizers   those that only split
    models           BPE over bytes, or with a fallback for all of them: others drop what they do not know
    added tokens     those that do not swallow the white space beside them

A vocabulary of bytes may lack some, mostly control characters that its training text did not have. Those are dropped,
and do not count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

NFC_SHRINKS: Final = 4
"""NFC makes no text shorter than a fourth. The worst is U+1FBE U+0308 U+0301, 7 bytes, which becomes one character of
2 bytes."""

_SPLITTERS: Final = ("ByteLevel", "Digits", "Punctuation", "Split")
_ADDERS: Final = ("Metaspace", "Prepend")
_NOT_IN_UTF8: Final = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


@dataclass(frozen=True, slots=True)
class Bound:
    """A token stands for at most `per_token` bytes of text, not counting those in `dropped`."""

    per_token: int
    dropped: bytes = b""

    def allows(self, text: bytes, tokens: int) -> bool:
        """Whether so many tokens might do for this text."""
        limit = self.per_token * tokens
        return len(text) <= limit or len(text.translate(None, self.dropped)) <= limit


def bound_of(tokenizer_json: bytes) -> Bound | None:
    """For a tokenizer.json; None where there is no bound. Raises ValueError or KeyError for what is none."""
    parts: dict[str, Any] = json.loads(tokenizer_json)
    stages = [*_flat(parts.get("normalizer"), "normalizers"), *_flat(parts.get("pre_tokenizer"), "pretokenizers")]
    shrinks = 1
    for stage in stages:
        shrinks *= _shrinks(stage)
    added = parts.get("added_tokens") or []
    dropped = _dropped(parts["model"], [stage["type"] for stage in stages])
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if not shrinks or dropped is None or swallows or parts.get("truncation"):
        return None
    # A letter of a byte-level vocabulary stands for one byte. Other names are never shorter than the text they stand
    # for: "<0x0A>" is longer than its byte.
    is_byte_level = any(stage["type"] == "ByteLevel" for stage in stages)
    sizes = [len(name if is_byte_level else name.encode()) for name in parts["model"]["vocab"]]
    sizes += [len(token["content"].encode()) for token in added]
    return Bound(shrinks * max(sizes), dropped)


def byte_letters() -> dict[str, int]:
    """The byte that each letter of byte-level vocabularies means: printable Latin-1 means itself, and the others follow
    from U+0100 on."""
    letters: dict[str, int] = {}
    following = 0x100
    for byte in range(0x100):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            letters[chr(byte)] = byte
        else:
            letters[chr(following)] = byte
            following += 1
    return letters


def _flat(part: Any, children: str) -> list[dict[str, Any]]:
    if not part:
        return []
    if part["type"] == "Sequence":
        return [each for child in part[children] for each in _flat(child, children)]
    return [part]


def _shrinks(stage: dict[str, Any]) -> int:
    """How many times shorter a stage may make a text; 0: any number of times, or unknown."""
    match stage["type"]:
        case "NFC":
            return NFC_SHRINKS
        case "Replace":
            literal = stage["pattern"].get("String", "")
            return int(bool(literal) and len(stage["content"].encode()) >= len(literal.encode()))
        case kind:
            return int(kind in (*_SPLITTERS, *_ADDERS) and stage.get("behavior") != "Removed")


def _dropped(model: dict[str, Any], stages: list[str]) -> bytes | None:
    """The bytes that the model does not know; None: it may drop other things too."""
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    vocab: dict[str, int] = model["vocab"]
    if "ByteLevel" not in stages:
        escapes = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(0x100))
        return b"" if escapes else None
    missing = {byte for letter, byte in byte_letters().items() if letter not in vocab} - _NOT_IN_UTF8
    # Where the text is changed first, its own bytes do not tell what will be dropped.
    if missing and not all(stage in _SPLITTERS for stage in stages):
        return None
    return bytes(sorted(missing))
