"""Two workers that start together share one conversion."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.worker.model import tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

START = """
import json, sys
from pathlib import Path
from worker.model import hf, loader
lines = []
files = loader.resolve(sys.argv[1], cache_dir=Path(sys.argv[2]), dtype="float32", device="cpu", progress=lines.append)
runner = hf.load(files, num_blocks=4, block_size=16, progress=lines.append)
print(json.dumps({"lines": lines, "fingerprint": runner.fingerprint, "directory": str(files.directory)}))
"""


@pytest.mark.timeout(180)
def test_two_processes_convert_once(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", START, str(tmp_path / "tiny.gguf"), str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        results = [json.loads(process.communicate(timeout=150)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    assert sum(line.startswith("converting") for result in results for line in result["lines"]) == 1
    assert results[0]["fingerprint"] == results[1]["fingerprint"]
    assert results[0]["directory"] == results[1]["directory"]
