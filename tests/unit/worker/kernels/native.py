"""The builds of the native kernels that can be tried here."""

from __future__ import annotations

import os

from worker.kernels.native.library import LEVELS, Native, NativeUnavailableError


def builds(threads: int) -> dict[str, Native]:
    """By level. Empty where no compiler was found when the package was installed."""
    found = {}
    for level in LEVELS:
        try:
            found[level] = Native(level, threads)
        except NativeUnavailableError:
            continue
    return found


NATIVE = builds(1)
if os.environ.get("CI") and not NATIVE:
    raise RuntimeError("no native kernels were built: in CI, what is skipped without them must run")
TEAMS = builds(3)
"""With more threads than some machines have cores."""
