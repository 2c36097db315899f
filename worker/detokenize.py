"""From token ids to text, a step at a time.

Tokens are bytes, and characters may span tokens: the text of a sequence is the UTF-8 decoding of all its tokens' bytes
(what is invalid becomes U+FFFD), cut before the first stop string. ``TextStream`` hands it out in pieces, each as soon
as it is certain; the joined pieces are always the whole text, wherever the edges of tokens and steps were.

A stop string *completes* at the first character with which the text ends in it. The one that completes first wins, the
longest if several do with the same character.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worker.params import StopParams


class UnsupportedTokenizer(ValueError):  # noqa: N818 (reads as what it is)
    """The tokenizer's decoder isn't one whose tokens are bytes."""


class TokenBytes:
    """The bytes of every token of a vocabulary. Special tokens and unknown ids have none."""

    def __init__(self, table: Sequence[bytes], *, strip: str = "") -> None:
        """``table[token_id]`` are the bytes of a token. A text loses as much of ``strip`` as it starts with."""
        self._table = table
        self._strip = strip

    @classmethod
    def from_json(cls, tokenizer_json: str | bytes) -> TokenBytes:
        """Read a ``tokenizer.json``: byte-level BPE, or SentencePiece-like pieces with byte fallback.

        Bytes that aren't UTF-8 come out alike for both kinds. (``tokenizers`` itself, for the second kind, replaces a
        whole run of byte tokens when any byte of it is wrong, which can't be known before the run has ended.)

        Raises UnsupportedTokenizer on another kind of decoder.
        """
        text = tokenizer_json.decode() if isinstance(tokenizer_json, bytes) else tokenizer_json
        to_bytes, strip = _decoder(json.loads(text).get("decoder"))
        tokenizer = Tokenizer.from_str(text)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for piece, token_id in vocabulary.items():
            if token_id not in special:
                table[token_id] = to_bytes(piece)
        return cls(table, strip=strip)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, token_id: int) -> bytes:
        return self._table[token_id] if token_id < len(self._table) else b""

    def stream(self, stopping: StopParams) -> TextStream:
        """A detokenizer for one sequence."""
        return TextStream(self, stop=stopping.stop, include_stop=stopping.include_stop, strip=self._strip)


class TextStream:
    """The text of one sequence in the making."""

    def __init__(
        self, tokens: TokenBytes, *, stop: Sequence[str] = (), include_stop: bool = False, strip: str = ""
    ) -> None:
        self.stop_match = ""
        """The stop string that has ended the text; empty while none has."""
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_Stop(text) for text in dict.fromkeys(stop)]
        self._include_stop = include_stop
        self._strip = strip
        self._held = ""
        """The longest tail of the text that a stop string begins with."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that became certain. After a stop string has matched there is none."""
        return self._cut(self._decoder.decode(b"".join(self._tokens[token_id] for token_id in token_ids)))

    def finish(self) -> str:
        """End the text; returns what was held back."""
        text = self._cut(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _cut(self, text: str) -> str:
        text = self._stripped(text)
        if not self._stops:
            return text
        if self.stop_match:
            return ""
        for index, char in enumerate(text):
            complete = [stop.text for stop in self._stops if stop.advance(char)]
            if complete:
                self.stop_match = max(complete, key=len)
                text = self._held + text[: index + 1]
                self._held = ""
                return text if self._include_stop else text[: -len(self.stop_match)]
        text = self._held + text
        # A stop string that will be kept has nothing to hide.
        hold = 0 if self._include_stop else max(stop.matched for stop in self._stops)
        certain = len(text) - hold
        self._held = text[certain:]
        return text[:certain]

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._strip[0]:
                self._strip = ""
                break
            text, self._strip = text[1:], self._strip[1:]
        return text


class _Stop:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt's search)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0] * (len(text) + 1)
        """For each matched length, the next shorter one that the same characters also match."""
        length = 0
        for end in range(1, len(text)):
            while length and text[end] != text[length]:
                length = self._shorter[length]
            length += text[end] == text[length]
            self._shorter[end + 1] = length

    def advance(self, char: str) -> bool:
        """Add a character; True when the text now ends with the whole stop string, which is the last call."""
        while self.matched and self.text[self.matched] != char:
            self.matched = self._shorter[self.matched]
        self.matched += self.text[self.matched] == char
        return self.matched == len(self.text)


def _decoder(spec: dict[str, Any] | None) -> tuple[Callable[[str], bytes], str]:
    """The function from a token to its bytes, and what a text's start is stripped of, for a decoder's JSON."""
    steps = [] if spec is None else spec.get("decoders", [spec])
    kinds = " ".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        return _byte_level, ""
    if not re.fullmatch("(Replace )*ByteFallback( Fuse( Strip)?)?", kinds):
        raise UnsupportedTokenizer(
            f"the tokenizer's decoder is {kinds or 'missing'}; known are ByteLevel, and Replace ByteFallback Fuse Strip"
        )
    replacements = []
    strip = ""
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise UnsupportedTokenizer(f"the tokenizer's decoder replaces by a pattern, {step['pattern']}")
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip":
            if step["stop"]:
                raise UnsupportedTokenizer("the tokenizer's decoder strips the end of a text, which a stream has sent")
            strip = step["content"] * step["start"]
    return partial(_byte_fallback, replacements=replacements), strip


def _byte_fallback(piece: str, replacements: Sequence[tuple[str, str]]) -> bytes:
    """A piece stands for its characters, or as ``<0xNN>`` for a byte."""
    for old, new in replacements:
        piece = piece.replace(old, new)
    return bytes([int(piece[3:5], 16)]) if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece) else piece.encode()


def _byte_level(piece: str) -> bytes:
    """Each character stands for a byte. A piece with any other character, an added token, stands for itself."""
    try:
        return bytes(_BYTE_OF[char] for char in piece)
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes: the printable ones of Latin-1 are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
