"""What workers of batches see to besides, each at its time: in processes of their own, since a worker must not stop
telling that it lives."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.embedded import follow_parent
from kvstore.errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.batches import BatchStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chore:
    """Something that is to be done now and again, by one worker of the fleet each time."""

    name: str
    every_s: int
    arguments: tuple[str, ...]
    """Of ``octavo``."""


class Chores:
    """Call ``look`` about every second."""

    def __init__(self, store: BatchStore, chores: Sequence[Chore]) -> None:
        self._store = store
        self._chores = tuple(chores)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def look(self) -> None:
        """Begins what is due, and logs what has failed. A broker that is away is asked again later."""
        for chore in self._chores:
            running = self._running.get(chore.name)
            if running is not None:
                if (status := running.poll()) is None:
                    continue
                del self._running[chore.name]
                if status:
                    logger.warning("%s failed with status %d; see above", chore.name, status)
            try:
                if self._store.due(chore.name, chore.every_s):
                    self._running[chore.name] = _begun(chore)
            except (BrokerError, OSError) as error:
                logger.warning("%s: %s", chore.name, error)

    def end(self) -> None:
        """What runs is ended; it will be due again in its time."""
        for running in self._running.values():
            running.terminate()
            running.wait()


def _begun(chore: Chore) -> subprocess.Popen[bytes]:
    command = follow_parent([sys.executable, "-P", "-m", "ops.cli", *chore.arguments])
    # Its output goes where the worker's log goes: what a supervisor reads on stdout is the worker's alone.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
