"""What options of the bench commands take beside what click knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bench.workload import Lengths
from ops.config import POLICIES
from worker.options import SHARED

F = TypeVar("F", bound=Callable[..., Any])


MOST = 1 << 20
"""Of what is counted, where nothing else limits it."""
MOST_DIGITS = 20
"""Of a number: Python refuses to read very long ones."""


class LengthsParam(click.ParamType[Lengths]):
    """`N` or `LOW:HIGH`."""

    name = "N|LOW:HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        try:
            return value if isinstance(value, Lengths) else Lengths.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class LevelsParam(click.ParamType[tuple[int, ...]]):
    """Comma-separated positive numbers, up to ``most``."""

    name = "N,N,..."

    def __init__(self, most: int = MOST) -> None:
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and part.strip(" 0") for part in parts):
            self.fail(f"{value!r} is no list of positive numbers", param, ctx)
        if over := [part.strip() for part in parts if len(part.strip()) > MOST_DIGITS or int(part) > self.most]:
            self.fail(f"{over[0]} is more than {self.most}", param, ctx)
        return tuple(int(part) for part in parts)


class NumbersParam(click.ParamType[tuple[float, ...]]):
    """Comma-separated positive numbers, whole or not, each once."""

    name = "X,X,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(float(part) for part in str(value).split(",")))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < number < float("inf") for number in numbers):
            self.fail(f"{value!r} is no list of positive numbers", param, ctx)
        return numbers


class PoliciesParam(click.ParamType[tuple[str, ...]]):
    """Comma-separated policies, each once."""

    name = "P,P,..."
    ALL = ",".join(POLICIES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(part.strip() for part in str(value).split(","))
        if unknown := [name for name in names if name not in POLICIES]:
            self.fail(f"{unknown[0]!r} is none of {', '.join(POLICIES)}", param, ctx)
        return tuple(dict.fromkeys(names))


def of_worker(name: str, **changes: Any) -> Callable[[F], F]:
    """A worker's option, with its type and default, of a command that has an engine or a model of its own."""
    settings = {**SHARED[name], "help": "As of a worker.", "show_default": True, **changes}
    return click.option(name, **settings)


def count(name: str, default: int, told: str, *, least: int = 1, most: int = MOST) -> Callable[[F], F]:
    """An option that says how many."""
    return click.option(name, type=click.IntRange(least, most), default=default, show_default=True, help=told)


OUT = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="bench-results",
    show_default=True,
    help="Folder.",
)
PLOT = click.option(
    "--plot", type=click.Choice(["png", "svg", "none"]), default="png", show_default=True, help="Format."
)
