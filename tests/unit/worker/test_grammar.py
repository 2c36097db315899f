"""Structures over a model's tokens: which of them may come, when the text is whole, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvstore.model_card import ModelCard
from kvstore.structure import StructureRefused
from octavo.v1.inference_pb2 import Structure
from worker import grammar
from worker.detokenize import TokenBytes
from worker.grammar import Compiler, Grammars, LibraryGrammar
from worker.matching import MatchError
from worker.model.simulated_text import END, START, VOCAB_SIZE, tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.grammar import LibraryMatcher

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "books": {"type": "array", "items": {"enum": ["Virgil", "Homer"]}, "maxItems": 3},
    },
    "required": ["name", "born", "books"],
    "additionalProperties": False,
}
TEXT = '{"name": "Aldus é\\n", "born": 1449, "books": ["Virgil", "Homer"]}'


def card(tokenizer: bytes, vocab_size: int = VOCAB_SIZE, ends: tuple[int, ...] = (END,)) -> ModelCard:
    return ModelCard("f", vocab_size, ends, tokenizer, b"{}")


@cache
def by_bytes() -> Compiler:
    """A token for each byte."""
    return Compiler(card(tokenizer_json()))


@cache
def merged() -> Tokenizer:
    """Tokens of several bytes, trained on what is to be said; the first two are for control."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


@cache
def by_pieces() -> Compiler:
    return Compiler(card(merged().to_str().encode(), merged().get_vocab_size(), (0,)))


def regex(text: str) -> Structure:
    return Structure(regex=text)


def schema(value: object) -> Structure:
    return Structure(json_schema=json.dumps(value))


def allowed(matcher: LibraryMatcher) -> set[int]:
    mask = matcher.mask()
    return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}


def ids(text: str) -> list[int]:
    return [*text.encode()]


def pieces(text: str) -> list[int]:
    found: list[int] = merged().encode(text).ids
    return found


both = pytest.mark.parametrize(("compiler", "encode"), [(by_bytes, ids), (by_pieces, pieces)], ids=["bytes", "pieces"])


def whole(matcher: LibraryMatcher, tokens: Sequence[int]) -> bool:
    """Whether these make a text of that form, each token being allowed."""
    for token in tokens:
        if token not in allowed(matcher):
            return False
        if matcher.accept([token]):
            return token == tokens[-1]
    return END in allowed(matcher) or 0 in allowed(matcher)


def test_only_what_goes_on_is_allowed_and_the_end_where_the_text_is_whole() -> None:
    matcher = by_bytes().compile(regex("ab|cde*")).start()
    assert allowed(matcher) == {*b"ac"}
    assert not matcher.accept(ids("c"))
    assert allowed(matcher) == {*b"d"}
    assert not matcher.accept(ids("d"))
    assert allowed(matcher) == {*b"e", END}
    assert not matcher.accept(ids("eee"))
    assert allowed(matcher) == {*b"e", END}


def test_where_nothing_can_follow_the_text_is_whole() -> None:
    compiled = by_bytes().compile(regex("ab|cde?"))
    assert [compiled.start().accept(ids(text)) for text in ("a", "ab", "cd", "cde")] == [False, True, False, True]


def test_no_control_token_is_ever_text() -> None:
    matcher = by_bytes().compile(regex(r"(?s:.*)")).start()
    assert START not in allowed(matcher)
    assert allowed(matcher) >= {*b"<|start|>", END}


def test_every_end_of_the_model_is_one() -> None:
    matcher = Compiler(card(tokenizer_json(), ends=(END, START))).compile(regex("a*")).start()
    assert allowed(matcher) == {*b"a", END, START}


def test_a_model_without_an_end_has_no_answers_with_a_form() -> None:
    with pytest.raises(StructureRefused, match="this model has no end token"):
        Compiler(card(tokenizer_json(), ends=())).compile(regex("a"))


@both
def test_json_comes_as_the_schema_says(compiler: Callable[[], Compiler], encode: Callable[[str], list[int]]) -> None:
    compiled = compiler().compile(schema(PERSON))
    assert whole(compiled.start(), encode(TEXT))
    assert not whole(compiled.start(), encode(TEXT[:-1]))
    for old, new in (("1449", "999"), ('"Homer"', '"Dante"'), ('"name"', '"nome"'), (', "books"', ', "x": 1, "books"')):
        assert not whole(compiled.start(), encode(TEXT.replace(old, new)))


@both
def test_after_a_past_the_masks_are_those_without_a_break(
    compiler: Callable[[], Compiler], encode: Callable[[str], list[int]]
) -> None:
    """Whoever goes on with an answer knows its tokens, and asks for no mask but the next."""
    compiled, tokens = compiler().compile(schema(PERSON)), encode(TEXT)
    undisturbed = compiled.start()
    for count, token in enumerate(tokens):
        resumed = compiled.start()
        assert not resumed.accept(tokens[:count])
        expected = undisturbed.mask()
        assert np.array_equal(resumed.mask(), expected)
        assert np.array_equal(undisturbed.mask(), expected)
        undisturbed.accept([token])


def test_choices_have_nothing_to_do_with_each_other() -> None:
    compiled = by_bytes().compile(regex("ab|ba"))
    one, other = compiled.start(), compiled.start()
    one.accept(ids("a"))
    other.accept(ids("b"))
    assert (allowed(one), allowed(other), allowed(compiled.start())) == ({*b"b"}, {*b"a"}, {*b"ab"})


def test_what_was_just_compiled_is_not_compiled_again() -> None:
    compiler = Compiler(card(tokenizer_json()))
    kept = compiler.compile(regex("ab"))
    kept.start().accept(ids("a"))
    assert compiler.compile(regex("ab")) is kept
    assert allowed(kept.start()) == {*b"a"}
    for number in range(grammar.KNOWN):
        compiler.compile(regex(f"{number}"))
    assert compiler.compile(regex("ab")) is not kept


def test_json_has_no_endless_white_space() -> None:
    compiled = by_bytes().compile(Structure(json_object=True))
    for text in ('{"a":1}', '{\n    "a" : [ 1,\t2 ]\n}', "{ }"):
        assert whole(compiled.start(), ids(text))
    matcher = compiled.start()
    matcher.accept(ids("{" + " " * 32))
    assert not {*b" \n"} & allowed(matcher)
    free = by_bytes().compile(schema({"type": "object", "x-guidance": {"whitespace_flexible": True}})).start()
    free.accept(ids("{" + " " * 32))
    assert {*b" \n"} & allowed(free)


def test_what_is_out_of_form_is_told_with_the_next_mask() -> None:
    matcher = by_bytes().compile(regex("abc")).start()
    assert not matcher.accept(ids("ax"))
    with pytest.raises(MatchError, match="the answer can't keep to its structure: "):
        matcher.mask()


def test_what_has_no_first_token_is_refused_beforehand() -> None:
    with pytest.raises(StructureRefused, match="the answer can't keep to its structure: nothing can follow"):
        by_bytes().compile(regex(r"[^\s\S]"))


@pytest.mark.parametrize("pattern", ["((a{1000}){1000}){1000}", "x(ab){100000}", "a" * 30_000], ids=["a", "x", "long"])
def test_text_without_a_choice_is_not_followed_to_its_end(pattern: str) -> None:
    """Nor forced into tokens: any that it begins with may come."""
    matcher = by_pieces().compile(regex(pattern)).start()
    assert not matcher.accept(pieces(pattern[0].strip("(") or "a"))
    assert allowed(matcher) >= {*pieces("a")}


def test_a_token_that_takes_too_long_is_the_answers_last(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = by_bytes().compile(regex("a{3}b")).start()
    allowed(matcher)
    monkeypatch.setattr(grammar, "TOKEN_S", 0.0)
    matcher.accept(ids("a"))
    for _ in range(2):
        with pytest.raises(MatchError, match="the structure takes more than 0 ms for one token; make it simpler"):
            matcher.mask()


def test_tokens_that_are_no_bytes_are_refused() -> None:
    words = json.loads(tokenizer_json()) | {"decoder": None}
    with pytest.raises(StructureRefused, match="this model's tokens can't be matched: "):
        Compiler(card(json.dumps(words).encode())).compile(regex("a"))


def test_the_bytes_of_tokens_are_the_detokenizers() -> None:
    tokenizer = by_pieces()._tokenizer
    table = TokenBytes.from_json(merged().to_str())
    text = [token for token in range(2, len(table)) if table[token] != b"\xff"]  # of which no text has any
    assert [tokenizer.decode_bytes([token]) for token in text] == [table[token] for token in text]


# In a thread


async def test_compiling_holds_up_nobody_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "COMPILE_S", 0.05)
    go_on = threading.Event()
    compile_now = Compiler.compile

    def compile_later(self: Compiler, structure: Structure) -> LibraryGrammar:
        if structure.regex == "slow":
            assert go_on.wait(20)
        return compile_now(self, structure)

    monkeypatch.setattr(Compiler, "compile", compile_later)
    grammars = Grammars(card(tokenizer_json()))
    with pytest.raises(TimeoutError, match=r"was not compiled within 0\.05 s; try again later"):
        await grammars.compile(regex("slow"))
    go_on.set()
    monkeypatch.setattr(grammar, "COMPILE_S", 20.0)
    assert allowed((await grammars.compile(regex("b"))).start()) == {*b"b"}
    with pytest.raises(StructureRefused):
        await grammars.compile(regex("("))
    await asyncio.to_thread(grammars.close)
