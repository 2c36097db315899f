"""The committed stubs are what the protos generate: `make proto` changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto" / "octavo" / "v1").glob("*.proto"))


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-Iproto"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}"),
            *(str(path.relative_to(ROOT)) for path in PROTOS),
        ],
        cwd=ROOT,
        check=True,
        timeout=50,
    )
    generated = {path.name: path.read_text() for path in (tmp_path / "octavo" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in PROTOS[0].parent.glob("*_pb2*")}
    assert len(generated) == 3 * len(PROTOS)
    assert sorted(generated) == sorted(committed)
    stale = [name for name, text in generated.items() if text != committed[name]]
    assert not stale, f"run `make proto`: {', '.join(stale)}"
