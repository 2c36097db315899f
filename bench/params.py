"""What options of the bench commands take beside what click knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.workload import Lengths
from ops.config import POLICIES


class LengthsParam(click.ParamType[Lengths]):
    """`N` or `LOW:HIGH`."""

    name = "N|LOW:HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        try:
            return value if isinstance(value, Lengths) else Lengths.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class LevelsParam(click.ParamType[tuple[int, ...]]):
    """Comma-separated positive numbers."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is no list of positive numbers", param, ctx)
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
