"""Our engine, in our own environment: the only one of these files that imports ours."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.engine import OurEngine


class Peer:
    """Keeps one engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from bench.engine import EngineConfig, OurEngine

        self.versions = {name: version(name) for name in ("octavo", "torch")}
        config = EngineConfig(
            model=settings["model"],
            dtype=settings["mode"],
            threads=settings["threads"],
            cache_dir=Path(settings["cache"]),
        )
        self._engine: OurEngine = OurEngine(config, _say)

    def answer(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[list[float]]]:
        answer = self._engine.answer(prompts, new)
        return answer.tokens, answer.times


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def start(settings: dict[str, Any]) -> Peer:
    return Peer(settings)
