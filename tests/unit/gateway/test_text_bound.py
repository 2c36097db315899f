"""The bound of text by bytes never refuses what could fit."""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.text_bound import NFC_SHRINKS, Bound, bound_of, byte_letters


def byte_level(extra: dict[str, int] | None = None) -> Tokenizer:
    """All bytes, the one merge of a and b, and added tokens of 5 and 4 bytes."""
    vocab = {letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE({**vocab, "ab": 256, **(extra or {})}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "\N{BOOKS}"])
    return tokenizer


def with_fallback(missing: int = 0) -> Tokenizer:
    """As models that came from SentencePiece."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256 - missing)}
    tokenizer = Tokenizer(models.BPE({**vocab, "\u2581": 256}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


def bound(tokenizer: Tokenizer, **changes: Any) -> Bound | None:
    parts = json.loads(tokenizer.to_str())
    model = changes.pop("model", {})
    return bound_of(json.dumps({**parts, **changes, "model": {**parts["model"], **model}}).encode())


def test_the_longest_token_tells() -> None:
    assert bound(byte_level()) == Bound(5)
    assert bound(byte_level({"\u0120" * 8: 257})) == Bound(8)  # eight spaces
    assert bound(with_fallback()) == Bound(6)


@pytest.mark.parametrize(
    "text", ["ab" * 50, "<eos>" * 20, "\N{BOOKS}" * 20, "\u00e9\n \t" * 20, "\N{GRINNING FACE}" * 20]
)
@pytest.mark.parametrize("make", [byte_level, with_fallback])
def test_no_text_has_fewer_tokens_than_it_says(make: Any, text: str) -> None:
    tokenizer = make()
    found = bound(tokenizer)
    assert found is not None
    assert found.allows(text.encode(), len(tokenizer.encode(text).ids))
    assert not found.allows(text.encode(), len(text.encode()) // found.per_token - 1)


def test_bytes_that_the_vocabulary_lacks_do_not_count() -> None:
    """SmolLM2's has no U+0004, among others: any number of them is no token at all."""
    letters = byte_letters()
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = json.loads(byte_level().to_str())
    for letter, byte in letters.items():
        if byte in (4, 0xC0, 0xF1, 0xFF):  # two of them are not in UTF-8 in any case
            del parts["model"]["vocab"][letter]
    found = bound_of(json.dumps(parts).encode())
    assert found == Bound(5, b"\x04\xf1")
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    assert len(tokenizer.encode("a" + "\4" * 100).ids) == 1
    assert found.allows(b"a" + b"\4" * 100, 1)
    assert not found.allows(b"a" * 6 + b"\4" * 100, 1)
    assert bound(Tokenizer.from_str(json.dumps(parts)), normalizer={"type": "NFC"}) is None


@pytest.mark.parametrize(
    ("normalizer", "times"),
    [
        (normalizers.NFC(), NFC_SHRINKS),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("x")]), NFC_SHRINKS),
        (normalizers.Replace("a", "bc"), 1),
        (normalizers.Replace("  ", " "), None),
        (normalizers.Strip(), None),
        (normalizers.NFKC(), None),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), None),
    ],
)
def test_normalizers_that_shorten(normalizer: Any, times: int | None) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    assert bound(tokenizer) == (None if times is None else Bound(5 * times))


@pytest.mark.parametrize(
    "changes",
    [
        {"truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]}},
        {"pre_tokenizer": None},  # then nothing makes letters of its alphabet of bytes
        {"added_tokens": [{"id": 258, "content": "<mask>", "lstrip": True, "rstrip": False}]},
        {"model": {"type": "WordPiece"}},
        {"model": {"end_of_word_suffix": "</w>"}},
    ],
)
def test_what_may_drop_text_has_no_bound(changes: dict[str, Any]) -> None:
    assert bound(byte_level(), **changes) is None
    assert bound(with_fallback(missing=1)) is None


def test_how_much_nfc_shortens() -> None:
    """Each character, against the longest spelling of its full decomposition."""
    longest: dict[str, int] = defaultdict(int)
    for code in range(0x30000):  # none above decomposes
        if not 0xD800 <= code <= 0xDFFF:
            spelling = chr(code)
            if len(plain := unicodedata.normalize("NFD", spelling)) == 1:
                longest[plain] = max(longest[plain], len(spelling.encode()))
    worst = 0.0
    for code in range(0x30000):  # none above decomposes
        if not 0xD800 <= code <= 0xDFFF and unicodedata.is_normalized("NFC", chr(code)):
            parts = unicodedata.normalize("NFD", chr(code))
            worst = max(worst, sum(longest[part] for part in parts) / len(chr(code).encode()))
    assert worst == 3.5
    assert worst <= NFC_SHRINKS
