"""When to leave something alone that does not work, and when to try it again.

Pure: times come from the caller.
"""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 0.5
LONGEST_S: Final = 15.0


class Circuit:
    """Open after a failure, for a time that doubles with each one in a row. Then one call may try."""

    def __init__(self) -> None:
        self._failures = 0
        """In a row."""
        self._until = 0.0
        self._trying = False

    def allows(self, now: float) -> bool:
        """Whether to try. While failures last one may, and others wait for what becomes of that."""
        if not self._failures:
            return True
        if now < self._until:
            return False
        # Until then, for one that is given up and never tells.
        self._trying, self._until = True, now + self._pause_s
        return True

    def wait_s(self, now: float) -> float:
        """How long it will say no."""
        return max(self._until - now, 0.0) if self._failures else 0.0

    def worked(self) -> None:
        """A try went well."""
        self._failures, self._trying = 0, False

    def failed(self, now: float) -> None:
        """A try did not. Of several that were under way at once the first counts."""
        if self._failures and not self._trying:
            return
        self._failures += 1
        self._trying, self._until = False, now + self._pause_s

    @property
    def _pause_s(self) -> float:
        return float(min(FIRST_S * 2 ** (self._failures - 1), LONGEST_S))
