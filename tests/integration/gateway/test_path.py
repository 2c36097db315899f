"""`octavo bench path` on a real gateway, broker and worker: what it reads is what these tell."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_model import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(300)
def test_every_part_of_the_path_is_told_by_the_processes_themselves(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    options = ["--requests", "2", "--streams", "3", "--rounds", "1", "--prompt-tokens", "20", "--output-tokens", "6"]
    fleet = ["--model", str(model), "--dtype", "float32", "--device", "cpu", "--kv-tokens", "1024", "--threads", "1"]
    command = [sys.executable, "-P", "-m", "ops.cli", "bench", "path", "--json", *options, *fleet]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout)
    first, streams = results["first_token"], results["streams"]
    assert (first["requests"], streams["tokens"], streams["rounds"]) == (2, 18, 1)
    told = {name for name, value in first["parts_ms"].items() if value > 0}
    # What was not on the way, and what two processes may have done at the same time.
    assert told >= set(first["parts_ms"]) - {"log read", "between"}
    assert all(value > 0 for value in first["engine_parts_ms"].values())
    assert all(part["us_per_token"] > 0 for name, part in streams["parts"].items() if name != "log read")
    assert all(value > 0 for value in streams["engine_us_per_token"].values())
    assert streams["cpu_us_per_token"]["worker's event loop"] > 0
    assert streams["ratio"] > 0
