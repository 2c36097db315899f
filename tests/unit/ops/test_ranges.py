"""Numbers of options: `nan` and `inf` are none, wherever an option takes a number; threads have a limit everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from kvstore.ranges import MAX_THREADS, Finite
from ops.cli import COMMANDS, main

if TYPE_CHECKING:
    from collections.abc import Iterator


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All that can be called, with the words that call them."""
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*words, name))


EVERY = [(words, param) for words, command in commands(main) for param in command.params]


def test_every_number_of_every_command_is_finite() -> None:
    numbers = [(words, param) for words, param in EVERY if isinstance(param.type, click.FloatRange | type(click.FLOAT))]
    assert len(numbers) > 10
    assert [(words, param.name) for words, param in numbers if not isinstance(param.type, Finite)] == []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN"])
def test_what_is_no_finite_number_is_refused_with_its_name(value: str) -> None:
    ran = CliRunner().invoke(main, ["health", "--timeout", value])
    assert ran.exit_code == 2
    assert "Invalid value for '--timeout': " in ran.output
    assert ("is no finite number" in ran.output) == (value != "-inf")  # which is below the range as well


def test_finite_numbers_are_as_click_has_them() -> None:
    assert Finite(0, 1).convert("0.25", None, None) == 0.25
    assert Finite(min=0).convert("1e300", None, None) == 1e300
    with pytest.raises(click.BadParameter, match=r"2.0 is not in the range 0<=x<=1\."):
        Finite(0, 1).convert("2", None, None)
    with pytest.raises(click.BadParameter, match=r"'nan' is no finite number\."):
        Finite(0, 1).convert("nan", None, None)


def test_threads_have_the_same_limit_everywhere() -> None:
    found = {words: param.type for words, param in EVERY if {"--threads", "--tokenizer-threads"} & {*param.opts}}
    assert {
        ("up",),
        ("worker",),
        ("gateway",),
        ("tune",),
        ("bench", "core"),
        ("bench", "exact"),
        ("bench", "engine"),
    } <= set(found)
    assert {("bench", "kernels"), ("bench", "quality"), ("bench", "peers"), ("bench", "path"), ("demo",)} <= set(found)
    for words, kind in found.items():
        assert isinstance(kind, click.IntRange), words
        assert kind.max == MAX_THREADS, words


@pytest.mark.parametrize("name", sorted({"tune", "worker", "up"} & set(COMMANDS)))
def test_more_threads_are_refused_with_value_and_limit(name: str) -> None:
    ran = CliRunner().invoke(main, [name, "--threads", "100000"])
    least = 0 if name == "worker" else 1
    assert ran.exit_code == 2
    assert f"100000 is not in the range {least}<=x<={MAX_THREADS}." in ran.output
