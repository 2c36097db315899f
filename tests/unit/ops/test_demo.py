"""How the demo shows answers that stream at the same time, and what it insists on."""

from __future__ import annotations

import click
import pytest

from ops.answer import Answer, Choice
from ops.demo import Asked, LinePrinter, Wrong, check, complete_lines
from ops.demo_text import CAPITAL_QUESTION, QUESTIONS, SYSTEM_PROMPT


@pytest.mark.parametrize(
    ("text", "lines", "rest"),
    [
        ("", [], ""),
        ("Half sent", [], "Half sent"),
        ("One. Two", ["One."], "Two"),
        ("Ends here.", [], "Ends here."),  # a digit may follow: 3.5
        ("A!\n\nB? C", ["A!", "B?"], "C"),
        ("one two three fours", ["one two", "three"], "fours"),
        ("abcdefghijklm", ["abcdefghij"], "klm"),
    ],
)
def test_complete_lines(text: str, lines: list[str], rest: str) -> None:
    assert complete_lines(text, width=10) == (lines, rest)


def test_no_text_is_lost_however_it_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    text = "The moon pulls at the sea. It rises twice a day!\nThat is all there is to say about it, more or less. Yes"
    words: list[list[str]] = []
    for size in (1, 3, 1000):
        printer = LinePrinter(1)
        for start in range(0, len(text), size):
            printer.push(text[start : start + size])
        printer.finish("STOP")
        shown = [click.unstyle(line).removeprefix("1 | ") for line in capsys.readouterr().out.splitlines()]
        assert len(shown) >= 4
        assert all(len(line) <= LinePrinter.WIDTH for line in shown)
        words.append(" ".join(shown).split())
    assert words == [text.split()] * 3


def test_an_answer_that_was_cut_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter(2)
    printer.push("And so")
    printer.finish("LENGTH")
    assert click.unstyle(capsys.readouterr().out) == "2 | And so...\n"


def test_eight_questions_share_a_long_prompt() -> None:
    assert len(QUESTIONS) == len(set(QUESTIONS)) == 8
    assert CAPITAL_QUESTION in QUESTIONS
    assert len(SYSTEM_PROMPT.split()) > 500


def answered(text: str, finish: str = "STOP") -> list[Asked]:
    answer = Answer()
    answer.choices[0] = Choice(text=text, finish=finish, error="e")
    return [Asked(CAPITAL_QUESTION, answer)]


def test_a_wrong_capital_or_a_failed_answer_fails_the_demo() -> None:
    check(answered("The capital of France is Paris."))
    with pytest.raises(Wrong, match="the answer was 'Lyon'"):
        check(answered("Lyon"))
    with pytest.raises(Wrong, match="ended with ERROR: e"):
        check(answered("Paris", finish="ERROR"))
