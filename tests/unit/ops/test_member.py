"""A process that the fleet keeps alive: real ones, which die as they are told."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from ops import fleet
from ops.fleet import Member

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROGRAM = """
import os, pathlib, signal, sys
lives = pathlib.Path(__file__).with_name("lives")
life = int(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text(str(life))
if str(life) in os.environ["DIES"].split():
    sys.exit(3)
print('ready {"life": %d}' % life, flush=True)
signal.pause()
"""


class Notes:
    """What is said of the process, and a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._more.set()

    async def until(self, count: int) -> None:
        while len(self.lines) < count:
            self._more.clear()
            await self._more.wait()


@pytest.fixture
async def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Member]:
    """It dies in its second, third and fourth life before it is ready."""
    monkeypatch.setattr(fleet, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(fleet, "LONGEST_PAUSE_S", 0.04)
    (tmp_path / "mortal.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "DIES": "2 3 4"}
    kept = Member("w0", ["mortal"], environment, lambda *_: None)
    await kept.start(20)
    yield kept
    if kept.child.running:
        await kept.child.kill()


@pytest.mark.parametrize("healthy_s", [60.0, 0.0])
async def test_a_killed_process_comes_back_however_often_it_fails(
    member: Member, monkeypatch: pytest.MonkeyPatch, healthy_s: float
) -> None:
    """Pauses grow, and how often it failed is told, until it has lived for long enough."""
    monkeypatch.setattr(fleet, "HEALTHY_S", healthy_s)
    notes = Notes()
    keeping = asyncio.create_task(member.keep(20, notes))
    first = member.child.pid
    member.child.signal(signal.SIGKILL)
    await notes.until(9)
    failed = "w0 exited with status 3 before it was ready"
    assert notes.lines == [
        f"w0 (pid {first}) was ended by SIGKILL",
        "starting w0 again in 0.01 s",
        failed,
        "starting w0 again in 0.02 s; it has failed 2 times in a row",
        failed,
        "starting w0 again in 0.04 s; it has failed 3 times in a row",
        failed,
        "starting w0 again in 0.04 s; it has failed 4 times in a row",
        f"w0 is back (pid {member.child.pid})",
    ]
    assert (member.child.ready, member.child.pid != first) == ({"life": 5}, True)
    member.child.signal(signal.SIGKILL)
    await notes.until(12)
    again = "0.04 s; it has failed 5 times in a row" if healthy_s else "0.01 s"
    assert notes.lines[10] == f"starting w0 again in {again}"
    assert member.child.ready == {"life": 6}
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
