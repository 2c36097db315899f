"""Other programs that are run to their ends: what they say goes into a log, and that they still run is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.peers.process import TOLD_S, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

LINE: Final = 160
"""Characters of a log's line that are quoted."""


def run_tool(
    command: Sequence[str], log: TextIO, limit_s: float, note: Callable[[str], None], where: Path | None = None
) -> None:
    """Runs `command` in the folder `where`; a line to `note` first, and one every `TOLD_S` seconds.

    Raises:
        PeerFailed: it ended with another status than 0, took longer than `limit_s`, or could not be started.
    """
    name = shown(command)
    note(name)
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    # Some packages ask make for as many compilers as there are files, and a hundred of them leave no memory. The load
    # that make may add to is the one limit that their own wish does not overrule.
    variables = {**os.environ, "MAKEFLAGS": f"-l{(os.cpu_count() or 1) + 1}"}
    try:
        # A group of its own: a compiler that an installer has started is ended with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=where, env=variables, process_group=0
        )
    except OSError as error:
        raise PeerFailed(f"{name}: {error}") from error
    try:
        status = _wait(process, name, limit_s, note)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status is None:
        raise PeerFailed(f"{name}: not done within {limit_s:g} s; see {log.name}")
    if status:
        raise PeerFailed(f"{name} ended with status {status}: {last_words(Path(log.name))}; see {log.name}")


def _wait(process: subprocess.Popen[bytes], name: str, limit_s: float, note: Callable[[str], None]) -> int | None:
    """Its status; None when it did not end in time."""
    begin = time.monotonic()
    while (left := begin + limit_s - time.monotonic()) > 0:
        try:
            return process.wait(min(TOLD_S, left))
        except subprocess.TimeoutExpired:
            note(f"{name}: {time.monotonic() - begin:.0f} s")
    return None


def shown(command: Sequence[str]) -> str:
    """A command for people: a module's name instead of an interpreter's path, and no more than a line."""
    words = [Path(command[0]).name, *command[1:]]
    if "-m" in words:
        words = words[words.index("-m") + 1 :]
    line = " ".join(word for word in words if word != "--disable-pip-version-check")
    return line if len(line) <= LINE else f"{line[: LINE - 3]}..."


def last_words(log: Path) -> str:
    """The last line of a log that begins with ERROR, or else the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1][:LINE]
