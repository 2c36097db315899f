"""From token ids to text, a step at a time.

Tokens are bytes, and characters may span tokens: the text of a sequence is the UTF-8 decoding of all its tokens' bytes
(what is invalid becomes U+FFFD), cut before the first stop string. ``TextStream`` hands it out in pieces, each as soon
as it is certain; the joined pieces are always the whole text, wherever the edges of tokens and pushes were. Held back
are at most three bytes of an incomplete character, and a tail that a stop string begins with.

A stop string *completes* at the first character with which the text ends in it. The one that completes first wins, the
longest if several do with the same character. A character counts as said by the token that made it certain; what the
first ``min_tokens`` tokens say is no part of any stop string.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import lru_cache, partial
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
        self.texts = [_text(data) for data in table]
        """Of every token: its text, or None where its bytes alone aren't whole characters."""

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
        return TextStream(
            self,
            stop=stopping.stop,
            min_tokens=stopping.min_tokens,
            include_stop=stopping.include_stop,
            strip=self._strip,
        )


class TextStream:
    """The text of one sequence in the making."""

    __slots__ = (
        "_held",
        "_include_stop",
        "_pending",
        "_state",
        "_stops",
        "_strip",
        "_tokens",
        "_unsearched",
        "stop_match",
    )

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        strip: str = "",
    ) -> None:
        self.stop_match = ""
        """The stop string that has ended the text; empty while none has."""
        self._tokens = tokens
        self._stops = _stops(tuple(stop)) if stop else None
        self._unsearched = min_tokens
        """So many tokens are still to come before stop strings are looked for."""
        self._include_stop = include_stop
        self._strip = strip
        self._pending = b""
        """The beginning of a character."""
        self._state = 0
        """Of the search: its depth is how long a tail of the text some stop string begins with."""
        self._held = ""
        """That tail, unless stop strings are kept: then there is nothing to hide."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that became certain. After a stop string has matched there is none."""
        certain = ""
        for token_id in token_ids:
            if self.stop_match:
                break
            text = self._decode(token_id)
            if self._unsearched:
                self._unsearched -= 1
            elif self._stops is not None:
                text = self._cut(text, self._stops)
            certain += text
        return certain

    def finish(self, stop_token: int | None = None) -> str:
        """End the text; returns what was held back.

        With ``stop_token``, a token that ended the sequence and was not pushed, its text follows if stops are kept. In
        that text no stop string is looked for.
        """
        if self.stop_match:
            return ""
        if stop_token is not None and self._include_stop:
            return self._stripped((self._pending + self._tokens[stop_token]).decode("utf-8", "replace"))
        text = self._stripped(self._pending.decode("utf-8", "replace"))
        if self._stops is not None and not self._unsearched:
            text = self._cut(text, self._stops)
        held, self._held = self._held, ""
        return text + held

    def _decode(self, token_id: int) -> str:
        """The characters that a token completes."""
        if not self._pending:
            # Nearly always: a token of whole characters after whole characters.
            texts = self._tokens.texts
            whole = texts[token_id] if token_id < len(texts) else ""
            if whole is not None:
                return self._stripped(whole) if self._strip else whole
        data = self._pending + self._tokens[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._stripped(text)

    def _cut(self, text: str, stops: _Stops) -> str:
        """What is certain of the held text and this; it ends where a stop string completes."""
        if self._state == 0 and stops.first.isdisjoint(text):
            return text
        self._state, end = stops.search(self._state, text)
        text, self._held = self._held + text[:end], ""
        self.stop_match = stops.match[self._state]
        if self._include_stop:
            return text
        if self.stop_match:
            return text[: -len(self.stop_match)]
        certain = len(text) - stops.depth[self._state]
        self._held = text[certain:]
        return text[:certain]

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._strip[0]:
                self._strip = ""
                break
            text, self._strip = text[1:], self._strip[1:]
        return text


class _Stops:
    """Several stop strings as one automaton (Aho and Corasick's search).

    A state is the longest tail of the text that some stop string begins with; 0 is the empty one.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """Of each state: the one of the next shorter tail."""
        self.depth = [0]
        """Of each state: its length."""
        self.match = [""]
        """Of each state: the longest stop string that it ends with, or empty."""
        for text in stop:
            self.match[self._add(text)] = text
        # Breadth first, in order of length: what is shorter has been linked already.
        states = list(self._next[0].values())
        for state in states:
            for char, longer in self._next[state].items():
                self._shorter[longer] = self._step(self._shorter[state], char)
                states.append(longer)
            self.match[state] = self.match[state] or self.match[self._shorter[state]]
        self.first = frozenset(self._next[0])
        """Characters that a stop string begins with."""

    def search(self, state: int, text: str) -> tuple[int, int]:
        """Walk over a text from a state. The state in which it ends or a stop string completes, and where that is."""
        for index, char in enumerate(text):
            state = self._step(state, char)
            if self.match[state]:
                return state, index + 1
        return state, len(text)

    def _add(self, text: str) -> int:
        state = 0
        for char in text:
            following = self._next[state].setdefault(char, len(self._next))
            if following == len(self._next):
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append("")
            state = following
        return state

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(char, 0)


_stops = lru_cache(maxsize=64)(_Stops)
"""The choices of a request, and often a caller's many requests, have the same stop strings."""


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


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


def byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes: the printable ones of Latin-1 are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()
