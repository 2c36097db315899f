"""Where results go: into a folder that is there before anything is measured."""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NO_PLOT = "no plot without matplotlib: pip install 'octavo[bench]', or --plot none"


def results_folder(out: Path, plot: str = "none") -> None:
    """Makes the folder that results will go to. A measurement takes minutes: what can't be kept isn't begun.

    Raises:
        click.ClickException: no files can be written there, or no plot can be drawn.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = f"results can't be written to {out}: {error.strerror or error}"
        raise click.BadParameter(reason, param_hint="--out") from error
    if plot != "none" and find_spec("matplotlib") is None:
        raise click.ClickException(NO_PLOT)


def write_json(results: Any, path: Path) -> None:
    """Writes results, whole at any moment.

    Raises:
        click.ClickException: the file can't be written, for want of space or the like.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(results, indent=1) + "\n")
        fresh.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from error


def write_plot(draw: Callable[[Path], None], path: Path) -> None:
    """Lets ``draw`` make the file, which imports matplotlib.

    Raises:
        click.ClickException: there is none, or the file can't be written.
    """
    try:
        draw(path)
    except ImportError as error:
        raise click.ClickException(NO_PLOT) from error
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: OSError) -> click.ClickException:
    return click.ClickException(f"{path} can't be written: {error.strerror or error}")
