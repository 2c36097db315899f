"""Numbers that options of commands take. Loads nothing but click."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from click import Context, Parameter

MAX_THREADS: Final = 1024
"""Of one process. More than any machine has cores; torch crashes when it is asked for far more."""
THREADS: Final = click.IntRange(1, MAX_THREADS)
THREADS_OR_AUTO: Final = click.IntRange(0, MAX_THREADS)
"""0 leaves it to the process."""


class Finite(click.FloatRange):
    """A range of numbers without `nan` and `inf`: click lets `nan` into every range, since it is on neither side of a
    bound, and `inf` into those without an upper one."""

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return number
