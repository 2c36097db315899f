"""Hashes of prefixes are equal in all processes, whatever Python's own hashes are seeded with: F08."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvstore.block_hash import chain, root

ROOT = Path(__file__).parents[3]
FINGERPRINT = "sha256:abc"
PROGRAM = f"""
from kvstore.block_hash import chain, root
for salt in ("", "tenant"):
    print(*(each.hex() for each in chain(root({FINGERPRINT!r}, 16, salt), range(70), 16)))
print(hash({FINGERPRINT!r}))
"""


def test_they_do_not_depend_on_the_process() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        ).stdout.splitlines()
        for seed in ("0", "1", "random")
    ]
    here = [
        " ".join(each.hex() for each in chain(root(FINGERPRINT, 16, salt), range(70), 16)) for salt in ("", "tenant")
    ]
    assert [lines[:2] for lines in told] == [here] * 3
    assert here[0] != here[1]
    assert len({lines[2] for lines in told}) == 3  # the seeds took effect
