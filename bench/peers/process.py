"""A peer's process: messages to it and from it, one line of JSON each, and never longer than a limit.

While it is not asked anything it is stopped (SIGSTOP) with all its own children, so that threads which wait by spinning
take nothing from those that are measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

CLOSE_S: Final = 10.0
TOLD_S: Final = 30.0
"""Seconds between two lines about something that goes on."""
LAST_LINES: Final = 400
"""Characters of the log that a failure quotes."""


class PeerFailed(Exception):  # noqa: N818  a peer that failed is nothing wrong with this program
    """Why a peer can't be measured. It does not concern the others."""


class PeerProcess:
    """A running peer. A context manager: leaving it ends the process and all that it has started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts it, with `environment` on top of ours; what it says to people goes to `log`."""
        self._log = log
        with log.open("w") as said:
            try:
                # A group of its own, to be stopped and ended as one, but in our session: when we are killed, the system
                # ends those of its processes that are stopped.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    env={**os.environ, **environment},
                    process_group=0,
                    text=True,
                )
            except OSError as error:
                raise PeerFailed(f"not started: {error}") from error
        assert self._process.stdout is not None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self, message: Mapping[str, Any], limit_s: float, waiting: Callable[[float], None] = lambda _: None
    ) -> dict[str, Any]:
        """Sends `message`, wakes the process for as long as the answer takes, and returns that.

        `waiting` is told every `TOLD_S` seconds for how long.

        Raises:
            PeerFailed: it says so, it has ended, or it took longer than `limit_s` seconds.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._line(limit_s, waiting)
        except OSError:
            line = ""
        finally:
            self._signal(signal.SIGSTOP)
        return parsed(line) if line else self._ended()

    def _line(self, limit_s: float, waiting: Callable[[float], None]) -> str:
        """The next line that it says; empty when it has ended."""
        begin = time.monotonic()
        while (left := begin + limit_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=min(TOLD_S, left))
            if left > TOLD_S:
                waiting(time.monotonic() - begin)
        raise PeerFailed(f"no answer within {limit_s:g} s")

    def close(self) -> None:
        """Asks the process to end, and ends what is left of its group, even when that is interrupted."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._reader.join()

    def _ended(self) -> dict[str, Any]:
        self._signal(signal.SIGKILL)
        status = self._process.wait()
        said = self._log.read_text(errors="replace").strip()[-LAST_LINES:]
        raise PeerFailed(f"ended with status {status}: {said or 'it said nothing'}")

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group, which may be there when its first process is not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def parsed(line: str) -> dict[str, Any]:
    """The message in a line.

    Raises:
        PeerFailed: it tells of an error, or is no message.
    """
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise PeerFailed(f"no message: {line.strip()[:200]!r}")
    if "error" in message:
        raise PeerFailed(str(message["error"]))
    return message


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")
