"""How long a worker that was told to leave stays. Pure: times are of the caller's monotonic clock, in seconds."""

from __future__ import annotations

from typing import Final

MARGIN_S: Final = 3.0
"""What leaving may take beyond the grace time, to tell Redis what there is to tell."""


class Leaving:
    """Begins once, and is never taken back."""

    def __init__(self, grace_s: float) -> None:
        """``grace_s``: how long jobs may go on that run already."""
        self._grace_s = grace_s
        self._until: float | None = None

    @property
    def begun(self) -> bool:
        return self._until is not None

    def begin(self, now: float) -> bool:
        """False when it has begun already."""
        if self.begun:
            return False
        self._until = now + self._grace_s
        return True

    def hurry(self, now: float) -> None:
        """What begun is over now, without the rest of the grace time."""
        if self._until is not None:
            self._until = min(self._until, now)

    def time_is_up(self, now: float) -> bool:
        """Whether what still runs is left to others."""
        return self._until is not None and now >= self._until

    def overdue(self, now: float) -> bool:
        """Whether something holds the worker back that will not let it go."""
        return self._until is not None and now > self._until + MARGIN_S
