"""Real tokenizers, byte-level and SentencePiece-like: their streams, and which ones are refused."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.unit.worker.whole_text import whole
from worker.detokenize import TokenBytes, UnsupportedTokenizer
from worker.params import StopParams

if TYPE_CHECKING:
    from collections.abc import Sequence


LINES = [
    "The quick brown fox jumps over the lazy dog, and doesn't look back.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 12345",
    "def main():\n\treturn {'a': [1, 2, 3]}  # naïve café",
    "我能吞下玻璃而不伤身体。 日本語のテキスト 🙂👩‍👩‍👧‍👦",
]


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


@given(st.data())
def test_any_byte_level_tokens_stream_as_the_tokenizer_decodes_them(data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)


@given(st.text(max_size=10), st.booleans())
def test_any_text_survives_byte_fallback(text: str, strip: bool) -> None:
    tokenizer = sentencepiece_like(strip)
    ids = tokenizer.encode(text).ids
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)


@st.composite
def answers(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[list[list[int]], StopParams]:
    """Any tokens in pushes of any size, or those of a sentence; stop strings mostly taken from what they say."""
    any_tokens = st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=14)
    ids = draw(any_tokens | st.sampled_from([tokenizer.encode(line).ids[:20] for line in LINES]))
    edges = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=5)))
    said = "".join(tokenizer.decode(ids)) or "x"
    spans = st.tuples(st.integers(0, len(said) - 1), st.integers(1, 8)).map(lambda span: said[span[0] :][: span[1]])
    stopping = StopParams(
        max_tokens=99,
        min_tokens=draw(st.sampled_from([0, 0, 1, 5])),
        stop=tuple(draw(st.lists(spans | st.text(min_size=1, max_size=3), max_size=4))),
        include_stop=draw(st.booleans()),
    )
    return [ids[start:end] for start, end in zip([0, *edges], [*edges, len(ids)], strict=True)], stopping


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@given(st.data())
def test_streamed_and_whole_answers_are_the_same(make: Any, data: st.DataObject) -> None:  # A02, A04, A16
    tokenizer = make()
    tokens = TokenBytes.from_json(tokenizer.to_str())
    pieces, stopping = data.draw(answers(tokenizer))
    stream = tokens.stream(stopping)
    text = "".join([stream.push(piece) for piece in pieces] + [stream.finish()])
    ids = [token for piece in pieces for token in piece]
    strip = "" if make is byte_level else " "
    assert (text, stream.stop_match) == whole(tokens, ids, stopping, strip=strip)


def test_words_keep_their_spaces() -> None:  # A16
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
