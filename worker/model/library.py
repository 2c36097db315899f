"""What both ways into transformers share: its reports taken seriously, its progress bars off."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from transformers.utils import logging as transformers_logging

from worker.model.errors import ModelDamaged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path


def checked(report: Mapping[str, Collection[Any]], source: Path) -> None:
    """Raises `ModelDamaged` if a loading report names any tensor that is missing, unexpected or of another shape."""
    problems = [f"{kind.removesuffix('_keys')}: {_some(names)}" for kind, names in sorted(report.items()) if names]
    if problems:
        raise ModelDamaged(
            f"the tensors in {source} are not those that its configuration asks for: {'; '.join(problems)}"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the library's progress bars, which would tear the caller's own lines."""
    bars: Any = transformers_logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _some(names: Collection[Any], most: int = 5) -> str:
    listed = sorted(str(name) for name in names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
