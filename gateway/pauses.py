"""How long those wait who try something again: longer each time, and not all in step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE_S: Final = (0.1, 2.0)
"""Between two tries: the first pause and the longest. Each is drawn from half of it to all of it."""


def pauses() -> Iterator[float]:
    """Seconds between tries, without an end."""
    pause, longest = PAUSE_S
    while True:
        yield pause * random.uniform(0.5, 1)
        pause = min(2 * pause, longest)
