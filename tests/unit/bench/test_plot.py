"""The plot of a run, as a file that a viewer opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.plot import draw
from bench.stats import Sample, summarise

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_draw(tmp_path: Path, suffix: str, magic: bytes) -> None:
    sample = Sample(prompt_tokens=10, output_tokens=5, first_token_s=0.2, seconds_per_token=0.05, total_s=0.4)
    levels = [summarise(n, [sample] * n, wall_s=1.0).as_dict() for n in (1, 8)]
    levels.append(summarise(32, [Sample(error="all failed")], wall_s=1.0).as_dict())
    path = tmp_path / f"plot.{suffix}"
    draw(levels, "a title", path)
    assert path.read_bytes().startswith(magic)
