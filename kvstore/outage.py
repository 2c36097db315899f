"""How a process tells of something that it tries again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvstore.errors import BrokerAuth

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

FIRST_S: Final = 10.0
"""After so long the log is told again that it still fails; then after twice as long, and so on."""
LONGEST_S: Final = 300.0


REFUSED_S: Final = 30.0
"""A broker that refuses access for so long waits for somebody to change what it allows."""


class Refusals:
    """Of one thing that is tried again and again: how long the broker has refused access to it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def last(self, error: Exception) -> bool:
        """Another try was in vain. Whether it is to be the last: the broker has refused all for REFUSED_S."""
        if not isinstance(error, BrokerAuth):
            self._since = None
            return False
        now = self._clock()
        self._since = now if self._since is None else self._since
        return now - self._since >= REFUSED_S


class Outage:
    """Failures of one thing, in the log: when they begin, at growing intervals while they last, and when it works
    again. However often it is tried, the log stays short."""

    def __init__(self, logger: logging.Logger, what: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``what`` is done, as in "reading jobs"."""
        self._logger = logger
        self._what = what
        self._clock = clock
        self._since: float | None = None
        self._pause = FIRST_S
        self._due = 0.0

    def failed(self, error: object, *, traceback: bool = False) -> None:
        """Another try was in vain. ``traceback``: the first line has that of the exception being handled."""
        now = self._clock()
        if self._since is None:
            self._since, self._pause = now, FIRST_S
            if traceback:
                self._logger.exception("%s fails", self._what)
            else:
                self._logger.error("%s fails, trying again: %s", self._what, error)
        elif now >= self._due:
            self._pause = min(2 * self._pause, LONGEST_S)
            self._logger.error("%s has failed for %.0f s: %s", self._what, now - self._since, error)
        else:
            return
        self._due = now + self._pause

    def worked(self) -> None:
        """A try was no failure."""
        if self._since is not None:
            self._logger.warning("%s works again, after %.0f s", self._what, self._clock() - self._since)
            self._since = None
