"""Streamed text: the same as the whole text's, whatever the edges of tokens and steps."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from worker.detokenize import TextStream, TokenBytes, UnsupportedTokenizer
from worker.params import StopParams

if TYPE_CHECKING:
    from collections.abc import Sequence

whatever_it_takes = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LINES = [
    "The quick brown fox jumps over the lazy dog, and doesn't look back.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 12345",
    "def main():\n\treturn {'a': [1, 2, 3]}  # naïve café",
    "我能吞下玻璃而不伤身体。 日本語のテキスト 🙂👩‍👩‍👧‍👦",
]


def every_byte() -> TokenBytes:
    return TokenBytes([bytes([byte]) for byte in range(256)])


def streamed(
    pieces: Sequence[Sequence[int]], tokens: TokenBytes, stop: Sequence[str] = (), *, include_stop: bool = False
) -> tuple[list[str], str]:
    """What each push and the end gave, and the stop string that matched."""
    text = TextStream(tokens, stop=stop, include_stop=include_stop)
    got = [text.push(piece) for piece in pieces]
    got.append(text.finish())
    return got, text.stop_match


def whole(text: str, stop: Sequence[str], *, include_stop: bool = False) -> tuple[str, str]:
    """The rule in its plainest form: the text ends where it first ends in a stop string."""
    for end in range(len(text) + 1):
        matching = [one for one in stop if text[:end].endswith(one)]
        if matching:
            longest = max(matching, key=len)
            return (text[:end] if include_stop else text[: end - len(longest)]), longest
    return text, ""


# Bytes


@whatever_it_takes
@given(st.lists(st.binary(max_size=6), max_size=12))
def test_any_bytes_decode_as_if_at_once(pieces: list[bytes]) -> None:
    got, _ = streamed([list(piece) for piece in pieces], every_byte())
    assert "".join(got) == b"".join(pieces).decode("utf-8", "replace")


@whatever_it_takes
@given(st.text(max_size=20))
def test_no_character_is_broken_by_single_byte_tokens(text: str) -> None:
    got, _ = streamed([[byte] for byte in text.encode()], every_byte())
    assert "".join(got) == text
    assert all("\ufffd" not in piece for piece in got) or "\ufffd" in text


def test_a_character_comes_with_its_last_byte() -> None:
    got, _ = streamed([[byte] for byte in "a语🙂".encode()], every_byte())
    assert got == ["a", "", "", "语", "", "", "", "🙂", ""]


def test_a_lead_byte_without_its_rest_holds_nothing_up() -> None:
    got, _ = streamed([[0xF0], *([ord(char)] for char in "ABC")], every_byte())
    assert got == ["", "\ufffdA", "B", "C", ""]


def test_an_incomplete_character_at_the_end_is_replaced_once() -> None:
    got, _ = streamed([[ord("a")], list("🙂".encode()[:3])], every_byte())
    assert got == ["a", "", "\ufffd"]


# Stop strings


@st.composite
def texts_and_stops(draw: st.DrawFn) -> tuple[list[list[int]], str, list[str]]:
    """A text over few characters, some of several bytes, cut into tokens anywhere; stop strings often inside it."""
    text = draw(st.text(alphabet="aab,é🙂", max_size=16))
    data = text.encode()
    edges = sorted(draw(st.sets(st.integers(0, len(data)), max_size=6)))
    pieces = [list(data[start:end]) for start, end in zip([0, *edges], [*edges, len(data)], strict=True)]
    stops = draw(st.lists(st.text(alphabet="aab,é🙂", min_size=1, max_size=5), max_size=4))
    return pieces, text, stops


@whatever_it_takes
@given(texts_and_stops(), st.booleans())
def test_the_joined_stream_is_the_whole_text_cut_at_the_first_stop(
    example: tuple[list[list[int]], str, list[str]], include_stop: bool
) -> None:
    pieces, text, stops = example
    got, match = streamed(pieces, every_byte(), stops, include_stop=include_stop)
    assert ("".join(got), match) == whole(text, stops, include_stop=include_stop)


@whatever_it_takes
@given(texts_and_stops())
def test_text_is_held_only_while_its_tail_begins_a_stop(example: tuple[list[list[int]], str, list[str]]) -> None:
    pieces, _, stops = example
    stream = TextStream(every_byte(), stop=stops)
    data, sent = b"", ""
    for piece in pieces:
        sent += stream.push(piece)
        data += bytes(piece)
        if stream.stop_match:
            break
        text = data.decode("utf-8", "ignore")  # complete characters only
        tails = [text[len(text) - k :] for k in range(len(text) + 1)]
        held = max(len(tail) for tail in tails if any(one.startswith(tail) and one != tail for one in [*stops, "?"]))
        assert sent == text[: len(text) - held]


@whatever_it_takes
@given(st.binary(max_size=12), st.lists(st.text(alphabet="a\ufffdé", min_size=1, max_size=3), max_size=3))
def test_stops_are_found_in_what_invalid_bytes_become(data: bytes, stops: list[str]) -> None:
    got, match = streamed([[byte] for byte in data], every_byte(), stops)
    assert ("".join(got), match) == whole(data.decode("utf-8", "replace"), stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "match"),
    [
        (["Hello wor", "ld and mo", "re"], ["world"], ["Hello ", "", "", ""], "world"),
        (["a", ",", "b", ",", "x"], ["b,c"], ["a", ",", "", "", "b,x", ""], ""),
        (["xx;yy"], [";"], ["xx", ""], ";"),
        (["Paris"], ["Pari"], ["", ""], "Pari"),
        (["abc", "d"], ["bcd", "c"], ["ab", "", ""], "c"),
        (["abc"], ["bc", "c", "abcd"], ["a", ""], "bc"),
        (["aaa", "ab"], ["aab"], ["a", "a", ""], "aab"),
        (["a🙂"], ["🙂"], ["a", ""], "🙂"),
        (["ab"], ["b-"], ["a", "b"], ""),
    ],
)
def test_where_a_text_ends(pieces: list[str], stops: list[str], expected: list[str], match: str) -> None:
    assert streamed([list(piece.encode()) for piece in pieces], every_byte(), stops) == (expected, match)


def test_a_stop_that_is_kept_hides_nothing() -> None:
    pieces = [list(piece.encode()) for piece in ("one t", "w", "o three")]
    assert streamed(pieces, every_byte(), ["two"], include_stop=True) == (["one t", "w", "o", ""], "two")


def test_a_very_long_stop_that_almost_matches_costs_no_text() -> None:
    text = "ab" * 400 + "c"
    got, match = streamed([[byte] for byte in text.encode()], every_byte(), ["ab" * 128 + "a" + "c"])
    assert ("".join(got), match) == (text, "")


# Real tokenizers


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("\n\n", normalized=False)])
    return tokenizer


@cache
def sentencepiece_like(strip: bool = True) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "he", "▁a"]
    pieces += sorted({char for line in LINES[:2] for char in line.replace(" ", "▁")} - {*pieces})
    tokenizer = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁", -2.0), ("▁fox", -3.0)]
    pieces += [(char, -4.0) for char in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = sentencepiece_like().decoder
    return tokenizer


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer.token_to_id(piece)
    assert token is not None
    return token


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = TokenBytes.from_json(tokenizer.to_str()).stream(StopParams(max_tokens=1))
    return "".join([stream.push([token]) for token in ids] + [stream.finish()])


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like, unigram])
@pytest.mark.parametrize("line", [*LINES, "", " ", "  two  spaces ", "a", "é🙂"])
def test_a_stream_is_the_tokenizers_own_decoding(make: Any, line: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(line).ids
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)
    if make is not unigram:
        assert text_of(tokenizer, ids) == line


@whatever_it_takes
@given(st.data())
def test_any_byte_level_tokens_stream_as_the_tokenizer_decodes_them(data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)


@whatever_it_takes
@given(st.text(max_size=10), st.booleans())
def test_any_text_survives_byte_fallback(text: str, strip: bool) -> None:
    tokenizer = sentencepiece_like(strip)
    ids = tokenizer.encode(text).ids
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)


def test_words_keep_their_spaces() -> None:
    tokenizer = sentencepiece_like()
    ids = [id_of(tokenizer, piece) for piece in ("▁the", "▁a", "▁the", "he")]
    assert text_of(tokenizer, ids) == "the a thehe"
    assert text_of(sentencepiece_like(strip=False), ids) == " the a thehe"


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    tokenizer = byte_level()
    start, end = id_of(tokenizer, "<|im_start|>"), id_of(tokenizer, "<|im_end|>")
    hello = tokenizer.encode("hello").ids
    assert text_of(tokenizer, [start, *hello, 100_000, end]) == "hello"
    tokens = TokenBytes.from_json(tokenizer.to_str().encode())
    assert (tokens[end], tokens[100_000], len(tokens)) == (b"", b"", tokenizer.get_vocab_size())


def test_added_tokens_stand_for_themselves() -> None:
    tokenizer = byte_level()
    ids = [id_of(tokenizer, "<tool call>"), id_of(tokenizer, "\n\n")]
    assert text_of(tokenizer, ids) == "<tool call>\n\n" == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "missing"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}]}, "Fuse"),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 1},
                ],
            },
            "strips the end",
        ),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "pattern",
        ),
    ],
)
def test_another_decoder_is_refused_by_name(decoder: dict[str, Any] | None, message: str) -> None:
    spec = json.loads(byte_level().to_str())
    spec["decoder"] = decoder
    with pytest.raises(UnsupportedTokenizer, match=message):
        TokenBytes.from_json(json.dumps(spec))
