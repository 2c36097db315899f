"""Numbers that commands take for requests, within the bounds that gateways have where those need no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.limits import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION,
    MAX_TEMPERATURE,
    MAX_TOP,
    MIN_REPETITION,
)
from kvstore.ranges import Finite

if TYPE_CHECKING:
    from click import Context, Parameter


class Whole(click.ParamType[int]):
    """A whole number whose upper bound is only the protocol's, so that --help shows none: the one that counts is the
    model's."""

    name = "integer"

    def __init__(self, least: int, most: int) -> None:
        self._range = click.IntRange(least, most)

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> int:
        return int(self._range.convert(value, param, ctx))


class Bias(click.ParamType[tuple[int, float]]):
    """ID=VALUE: a token id and a number."""

    name = "ID=VALUE"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> tuple[int, float]:
        token, _, bias = str(value).partition("=")
        try:
            found = int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is no token id with a number, such as 50=-100", param, ctx)
        return TOKEN.convert(found[0], param, ctx), BIAS.convert(found[1], param, ctx)


class After(click.ParamType[tuple[int, int]]):
    """N or CHOICE=N: a choice, the first one where none is said, and the index of a token."""

    name = "N"

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> tuple[int, int]:
        choice, _, index = str(value).rpartition("=")
        try:
            found = int(choice or 0), int(index)
        except ValueError:
            self.fail(f"{value!r} is no token index, such as 5, or choice and index, such as 1=5", param, ctx)
        return CHOICE.convert(found[0], param, ctx), TOKEN.convert(found[1], param, ctx)


TOKEN: Final = Whole(0, 2**32 - 1)
TOKENS: Final = Whole(1, 2**32 - 1)
TOP_K: Final = Whole(0, 2**31 - 1)
SEED: Final = click.IntRange(0, 2**64 - 1)
CHOICE: Final = Whole(0, MAX_CHOICES - 1)
AFTER: Final = After()
CHOICES: Final = click.IntRange(1, MAX_CHOICES)
PRIORITY: Final = click.IntRange(-MAX_PRIORITY, MAX_PRIORITY)
TOP: Final = click.IntRange(0, MAX_TOP)
TEMPERATURE: Final = Finite(0, MAX_TEMPERATURE)
TOP_P: Final = Finite(0, 1, min_open=True)
MIN_P: Final = Finite(0, 1)
REPETITION: Final = Finite(MIN_REPETITION, MAX_REPETITION)
PENALTY: Final = Finite(-MAX_PENALTY, MAX_PENALTY)
BIAS: Final = Finite(-MAX_BIAS, MAX_BIAS)
