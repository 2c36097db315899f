"""How answers end: end tokens, stop tokens, stop strings, min_tokens; and what is told of it.

Comments such as A05 name the public fault reports of other servers that a test guards against.
"""

from __future__ import annotations

import pytest

from tests.unit.worker.engine_run import forced, ids, prompt_of, request, run
from tests.unit.worker.paged_model import EOS, NAN, POISON, TABLE, VOCAB
from worker.params import SamplingParams
from worker.sequence import Finish

PROMPT = prompt_of(5)
SEMICOLON = VOCAB - 1
"""Stands for any token that a caller wants to stop at."""

# End tokens and stop tokens


@pytest.mark.parametrize("include_stop", [False, True])
def test_eos_ends_an_answer_and_counts_but_has_no_text(include_stop: bool) -> None:  # A18
    engine = forced([*ids(" a b"), EOS, *ids(" c")])
    (answer,) = run(engine, request("a", PROMPT, ignore_eos=False, include_stop=include_stop))
    assert (answer.text, answer.finish, answer.token_ids[-1]) == (" a b", Finish.STOP, EOS)
    assert (len(answer.token_ids), answer.last.stop_token, answer.last.stop_match) == (3, EOS, "")


def test_eos_can_be_ignored() -> None:
    engine = forced([*ids(" a"), EOS, *ids(" c")])
    (answer,) = run(engine, request("a", PROMPT, max_tokens=3))
    assert (answer.text, answer.finish, answer.token_ids[1]) == (" a c", Finish.LENGTH, EOS)
    assert answer.last.stop_token is None


def test_eos_as_the_last_token_allowed_is_a_stop() -> None:
    engine = forced([*ids(" a"), EOS])
    (answer,) = run(engine, request("a", PROMPT, max_tokens=2, ignore_eos=False))
    assert answer.finish is Finish.STOP


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, " a"), (True, " a b")])
def test_a_stop_token_ends_an_answer_and_its_text_is_kept_on_request(
    ignore_eos: bool, include: bool, text: str
) -> None:
    tokens = ids(" a b c")
    stopping = {"stop_token_ids": (9, tokens[1]), "ignore_eos": ignore_eos, "include_stop": include}
    (answer,) = run(forced(tokens), request("a", PROMPT, **stopping))  # type: ignore[arg-type]
    assert (answer.text, answer.finish, answer.last.stop_token) == (text, Finish.STOP, tokens[1])
    assert answer.token_ids == tokens[:2]


def test_the_models_end_token_as_a_stop_token_is_not_ignored() -> None:
    engine = forced([*ids(" a"), EOS, *ids(" c")])
    (answer,) = run(engine, request("a", PROMPT, stop_token_ids=(EOS,), ignore_eos=True))
    assert (answer.text, answer.finish, answer.last.stop_token) == (" a", Finish.STOP, EOS)


def test_what_a_stop_token_says_is_not_searched_for_stop_strings() -> None:
    tokens = ids(" a bc")
    engine = forced(tokens)
    asked = request("a", PROMPT, stop=("bcd", "b"), stop_token_ids=(tokens[1],), include_stop=True)
    (answer,) = run(engine, asked)
    assert (answer.text, answer.last.stop_match, answer.last.stop_token) == (" a b", "", tokens[1])


def test_held_back_text_comes_before_a_stop_token() -> None:
    tokens = ids(" a bc d")
    (answer,) = run(forced(tokens), request("a", PROMPT, stop=("bcx",), stop_token_ids=(tokens[-1],)))
    assert [output.text for output in answer.outputs] == [" a", " ", "", "bc"]


# Stop strings


@pytest.mark.parametrize(("include", "text"), [(False, " a b"), (True, " a bcd")])
def test_a_stop_string_ends_text_before_it_and_reports_all_tokens(include: bool, text: str) -> None:  # A04
    tokens = ids(" a bcdef")
    engine = forced(tokens)
    (answer,) = run(engine, request("a", PROMPT, stop=("cd", "zz"), include_stop=include))
    assert (answer.text, answer.finish) == (text, Finish.STOP)
    assert answer.token_ids == tokens[:4]
    assert (answer.last.stop_match, answer.last.stop_token) == ("cd", None)


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        (" abcdefgh", "bcdefg", " a"),  # A01
        (" a b c d e f g h", "b c d e f g", " a "),  # A02
        ("語语", "语", "語"),  # A12, A13
        ("🙂a🙂b", "🙂b", "🙂a"),
    ],
)
def test_a_stop_across_many_tokens_never_shows(said: str, stop: str, text: str) -> None:
    (answer,) = run(forced(ids(said)), request("a", PROMPT, max_tokens=30, stop=(stop,)))
    assert (answer.text, answer.finish, answer.last.stop_match) == (text, Finish.STOP, stop)


def test_a_stop_with_the_last_token_allowed_is_a_stop() -> None:
    engine = forced(ids(" a b"))
    (answer,) = run(engine, request("a", PROMPT, max_tokens=2, stop=("b",)))
    assert (answer.text, answer.finish) == (" a ", Finish.STOP)


def test_held_back_text_comes_with_the_end() -> None:  # A05
    (answer,) = run(forced(ids(" a bc")), request("a", PROMPT, max_tokens=3, stop=("bcd",)))
    assert [output.text for output in answer.outputs] == [" a", " ", "bc"]
    assert answer.finish is Finish.LENGTH


def test_every_output_has_news_however_long_the_stop() -> None:  # A06
    (answer,) = run(forced(ids(" abcdefgh")), request("a", PROMPT, stop=("bcdefgijklmnopqrstuv",)))
    assert [len(output.token_ids) for output in answer.outputs] == [1] * 8
    assert answer.text == " abcdefgh"


def test_a_stop_string_in_the_very_last_character_is_a_stop() -> None:
    engine = forced([7, 8])
    (answer,) = run(engine, request("a", PROMPT, max_tokens=2, stop=("\ufffd",)))
    assert (answer.text, answer.finish) == ("", Finish.STOP)


def test_an_unfinished_character_comes_with_the_end() -> None:
    engine = forced([7, 8])
    (answer,) = run(engine, request("a", PROMPT, max_tokens=2))
    assert answer.text == "\ufffd"


def test_an_answer_in_any_company_is_text_alike() -> None:  # A13
    said = ids("🙂a语 b🙂🙂语语")
    alone = run(forced(said), request("a", PROMPT, max_tokens=len(said)))[0]
    together = run(forced(said), *[request(f"r{index}", PROMPT, max_tokens=len(said)) for index in range(8)])
    assert {one.text for one in together} == {alone.text} == {"🙂a语 b🙂🙂语语"}


# min_tokens


def test_no_end_token_comes_before_min_tokens() -> None:
    """The model would say it at once; the next likeliest of equals is token 0, for ever."""
    script = [EOS], [0, EOS], [0, 0, EOS], [0, 0, 0, EOS]
    for min_tokens in range(4):
        engine = forced(*script)
        (answer,) = run(engine, request("a", PROMPT, min_tokens=min_tokens, ignore_eos=False))
        assert answer.token_ids == [0] * min_tokens + [EOS]


def test_no_stop_token_comes_before_min_tokens_even_if_eos_is_ignored() -> None:
    engine = forced([SEMICOLON], [0, EOS, SEMICOLON, SEMICOLON])
    asked = request("a", PROMPT, min_tokens=3, stop_token_ids=(SEMICOLON,), sampling=SamplingParams(temperature=0.0))
    (answer,) = run(engine, asked)
    assert answer.token_ids == [0, EOS, 0, 0, 0, 0, 0, 0]
    assert answer.finish is Finish.LENGTH
    (answer,) = run(forced([0, EOS, SEMICOLON]), request("a", PROMPT, min_tokens=2, stop_token_ids=(SEMICOLON,)))
    assert (answer.token_ids, answer.finish) == ([0, EOS, SEMICOLON], Finish.STOP)


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 2), (2, 4), (4, 6), (6, 7)])
def test_no_stop_string_is_looked_for_before_min_tokens(min_tokens: int, length: int) -> None:
    said = ids("abababc")
    (answer,) = run(forced(said), request("a", PROMPT, max_tokens=7, min_tokens=min_tokens, stop=("ab",)))
    assert len(answer.token_ids) == length
    assert answer.text == ("abababc" if length == 7 else "ab" * (min_tokens // 2))


def test_an_error_flushes_the_text_and_keeps_the_count() -> None:
    engine = forced([*ids(" ab"), POISON, 9])
    (answer,) = run(engine, request("a", PROMPT, stop=("bPx",)))
    assert (answer.finish, answer.text) == (Finish.ERROR, " abP")
    assert (answer.last.start, answer.last.token_ids, answer.last.completion_tokens) == (3, (), 3)
    assert (TABLE[POISON], TABLE[NAN]) == (b"P", b"N")
