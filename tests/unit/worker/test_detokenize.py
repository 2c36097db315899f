"""Streamed text: the same as the whole text's, whatever the edges of tokens and steps.

Comments such as A05 name the public fault reports of other servers that a test guards against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker.whole_text import cut, whole
from worker.detokenize import TextStream, TokenBytes
from worker.params import StopParams

if TYPE_CHECKING:
    from collections.abc import Sequence


def every_byte() -> TokenBytes:
    return TokenBytes([bytes([byte]) for byte in range(256)])


def streamed(
    pieces: Sequence[Sequence[int]],
    tokens: TokenBytes,
    stop: Sequence[str] = (),
    *,
    include_stop: bool = False,
    min_tokens: int = 0,
) -> tuple[list[str], str]:
    """What each push and the end gave, and the stop string that matched."""
    text = TextStream(tokens, stop=stop, include_stop=include_stop, min_tokens=min_tokens)
    got = [text.push(piece) for piece in pieces]
    got.append(text.finish())
    return got, text.stop_match


# Bytes


@given(st.lists(st.binary(max_size=6), max_size=12))
def test_any_bytes_decode_as_if_at_once(pieces: list[bytes]) -> None:
    got, _ = streamed([list(piece) for piece in pieces], every_byte())
    assert "".join(got) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_no_character_is_broken_by_single_byte_tokens(text: str) -> None:
    got, _ = streamed([[byte] for byte in text.encode()], every_byte())
    assert "".join(got) == text
    assert all("\ufffd" not in piece for piece in got) or "\ufffd" in text


def test_a_character_comes_with_its_last_byte() -> None:  # A12
    got, _ = streamed([[byte] for byte in "a语🙂".encode()], every_byte())
    assert got == ["a", "", "", "语", "", "", "", "🙂", ""]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([0xF0, *b"ABC"], ["", "\ufffdA", "B", "C", ""]),  # A14
        ([0xF0, 0x9F, 0x99, *b"A"], ["", "", "", "\ufffdA", ""]),
        ([0xE8, 0xF0, 0x9F, *b"A"], ["", "\ufffd", "", "\ufffdA", ""]),
        ([0x80, 0xFF, *b"A"], ["\ufffd", "\ufffd", "A", ""]),
        ([0xE8, 0x20], ["", "\ufffd ", ""]),  # A15
    ],
)
def test_bytes_that_become_no_character_hold_nothing_up(data: list[int], expected: list[str]) -> None:
    got, _ = streamed([[byte] for byte in data], every_byte())
    assert got == expected


@given(st.lists(st.sampled_from([0x41, 0x80, 0x9F, 0xA0, 0xC3, 0xE0, 0xE8, 0xED, 0xF0, 0xF4, 0xF5]), max_size=40))
def test_at_most_three_bytes_are_held_back(data: list[int]) -> None:  # A14
    stream, sent = TextStream(every_byte()), ""
    for count, byte in enumerate(data, 1):
        sent += stream.push([byte])
        assert any(sent == bytes(data[: count - held]).decode("utf-8", "replace") for held in range(4))


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


@given(texts_and_stops(), st.booleans())
def test_the_joined_stream_is_the_whole_text_cut_at_the_first_stop(
    example: tuple[list[list[int]], str, list[str]], include_stop: bool
) -> None:
    pieces, text, stops = example
    got, match = streamed(pieces, every_byte(), stops, include_stop=include_stop)
    assert ("".join(got), match) == cut(text, stops, include_stop=include_stop)


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


@given(st.binary(max_size=12), st.lists(st.text(alphabet="a\ufffdé", min_size=1, max_size=3), max_size=3))
def test_stops_are_found_in_what_invalid_bytes_become(data: bytes, stops: list[str]) -> None:
    got, match = streamed([[byte] for byte in data], every_byte(), stops)
    assert ("".join(got), match) == cut(data.decode("utf-8", "replace"), stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "match"),
    [
        (["Hello wor", "ld and mo", "re"], ["world"], ["Hello ", "", "", ""], "world"),
        (["xa", "bcd", "e", "fgy"], ["abcdefg"], ["x", "", "", "", ""], "abcdefg"),  # A01
        (["one two", " three", " four"], ["two three fo"], ["one ", "", "", ""], "two three fo"),  # A02
        (["Letters"], ["tt"], ["Le", ""], "tt"),  # A03
        (["ab", "cd", "x"], ["bcdy"], ["a", "", "bcdx", ""], ""),
        (["ab", "cd"], ["bcdy"], ["a", "", "bcd"], ""),  # A05
        (["a", ",", "b", ",", "x"], ["b,c"], ["a", ",", "", "", "b,x", ""], ""),  # A07
        ([" H", " I", " J", " K", " L", " M"], ["K L M"], [" H", " I", " J", " ", "", "", ""], "K L M"),  # A08
        (["xx;yy"], [";"], ["xx", ""], ";"),  # A10
        (["Paris"], ["Pari"], ["", ""], "Pari"),  # A09
        (["abc", "d"], ["bcd", "c"], ["ab", "", ""], "c"),
        (["abc"], ["bc", "c", "abcd"], ["a", ""], "bc"),
        (["aaa", "ab"], ["aab"], ["a", "a", ""], "aab"),
        (["a🙂"], ["🙂"], ["a", ""], "🙂"),
        (["ab"], ["b-"], ["a", "b"], ""),
        (["do", " n't", " '", "s"], [" 's!"], ["do", " n't", "", "", " 's"], ""),  # A17
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


# Where the search begins, and how it ends


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("", "ab")), (1, ("a", "b")), (2, ("ab", "b")), (3, ("abb", "ab")), (5, ("abbab", "b")), (6, ("abbabb", ""))],
)
def test_what_the_first_tokens_say_is_no_part_of_a_stop(min_tokens: int, expected: tuple[str, str]) -> None:
    got, match = streamed([[byte] for byte in b"abbabb"], every_byte(), ["ab", "b"], min_tokens=min_tokens)
    assert ("".join(got), match) == expected


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[list[int]], StopParams, int | None]:
    """Bytes as tokens in pushes of any size, with stop strings that often occur; the token that ended them, or None."""
    data = draw(st.text(alphabet="aab🙂", max_size=10)).encode()
    if draw(st.booleans()):  # not always characters
        data += draw(st.binary(max_size=4))
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    edges = sorted(draw(st.sets(st.integers(0, len(data)), max_size=6)))
    pieces = [list(data[start:end]) for start, end in zip([0, *edges], [*edges, len(data)], strict=True)]
    stopping = StopParams(
        max_tokens=99,
        min_tokens=draw(st.integers(0, 12)),
        stop=tuple(draw(st.lists(st.text(alphabet="aab🙂\ufffd", min_size=1, max_size=4), max_size=4))),
        include_stop=draw(st.booleans()),
    )
    return pieces, stopping, draw(st.none() | st.sampled_from([*b"ab", 0x99, 0xF0]))


@given(answers())
def test_streamed_and_whole_answers_are_the_same(example: tuple[list[list[int]], StopParams, int | None]) -> None:
    """A04, A16 for tokens that are bytes; for those of tokenizers see test_tokenizers."""
    pieces, stopping, stop_token = example
    stream = every_byte().stream(stopping)
    text = "".join([stream.push(piece) for piece in pieces] + [stream.finish(stop_token)])
    flat = [byte for piece in pieces for byte in piece]
    assert (text, stream.stop_match) == whole(every_byte(), flat, stopping, stop_token=stop_token)


def test_the_token_that_ends_an_answer_has_text_only_if_stops_are_kept() -> None:
    for include_stop, expected in ((False, "a\ufffd"), (True, "aé")):
        stream = TextStream(every_byte(), include_stop=include_stop)
        assert stream.push("aé".encode()[:2]) + stream.finish("é".encode()[1]) == expected


def test_a_stop_string_before_the_last_token_has_ended_the_answer() -> None:
    stream = TextStream(every_byte(), stop=["b"], include_stop=True)
    assert stream.push(b"ab") + stream.finish(ord("c")) == "ab"
    assert stream.push(b"d") == ""
