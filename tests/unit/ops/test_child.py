"""Real processes: their ready line, their last words, their end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from ops.child import MAX_LINE, Child, ChildFailed, describe_exit, lines, parse_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


class Said:
    """What the children said, and a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")
        self._more.set()

    async def until(self, line: str) -> None:
        while line not in self.lines:
            self._more.clear()
            await self._more.wait()


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
async def child_of(tmp_path: Path, said: Said) -> AsyncIterator[Callable[[str], Child]]:
    """Makes a child that runs the given source; all are gone after the test."""
    children: list[Child] = []

    def make(source: str) -> Child:
        (tmp_path / "program.py").write_text("import os, signal, subprocess, sys, time\n" + source)
        child = Child("p", ["program"], {**os.environ, "PYTHONPATH": str(tmp_path)}, said)
        children.append(child)
        return child

    yield make
    for child in children:
        if child.running:
            await child.kill()


SERVE = "print('ready {\"port\": 7}', flush=True)\nsignal.pause()\n"


async def test_the_ready_line_is_parsed_and_not_passed_on(child_of: Callable[[str], Child], said: Said) -> None:
    child = child_of("print('loading', file=sys.stderr)\n" + SERVE)
    await child.start()
    await child.wait_ready(20)
    await said.until("p: loading")
    assert child.ready == {"port": 7}
    assert said.lines == ["p: loading"]
    assert await child.stop(20) is True
    assert child.returncode == -signal.SIGTERM


async def test_a_death_before_ready_tells_its_status_and_what_it_said_once(
    child_of: Callable[[str], Child], said: Said
) -> None:
    child = child_of("for i in range(100): print('line', i, file=sys.stderr)\nsys.exit('no such model')")
    await child.start()
    with pytest.raises(ChildFailed) as failed:
        await child.wait_ready(20)
    assert str(failed.value) == "p exited with status 1 before it was ready; see what [p] said above"
    assert said.lines == [*(f"p: line {i}" for i in range(100)), "p: no such model"]


async def test_a_death_without_a_word(child_of: Callable[[str], Child]) -> None:
    child = child_of("sys.exit(3)")
    await child.start()
    with pytest.raises(ChildFailed, match=r"^p exited with status 3 before it was ready$"):
        await child.wait_ready(20)


async def test_silence_is_a_failure_in_time(child_of: Callable[[str], Child]) -> None:
    child = child_of("signal.pause()")
    await child.start()
    with pytest.raises(ChildFailed, match=r"^p was not ready within 0\.2 s$"):
        await child.wait_ready(0.2)
    assert child.running


async def test_a_process_that_ignores_sigterm_is_killed(child_of: Callable[[str], Child]) -> None:
    child = child_of("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE)
    await child.start()
    await child.wait_ready(20)
    assert await child.stop(0.2) is False
    assert child.returncode == -signal.SIGKILL


async def test_a_clean_end_on_sigterm_is_told(child_of: Callable[[str], Child]) -> None:
    child = child_of("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + SERVE)
    await child.start()
    await child.wait_ready(20)
    assert await child.stop(20) is True
    assert child.returncode == 0
    child.signal(signal.SIGTERM)  # to a process that is gone: nothing happens


async def test_a_grandchild_that_keeps_the_pipe_open_does_not_delay_the_end(
    child_of: Callable[[str], Child], said: Said
) -> None:
    child = child_of(
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])\n"
        "print(p.pid, file=sys.stderr, flush=True)\n"
    )
    await child.start()
    assert await asyncio.wait_for(child.wait(), 20) == 0
    os.kill(int(said.lines[0].removeprefix("p: ")), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="a promise of the Linux kernel")
async def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import signal\n" + SERVE)
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import asyncio, os\n"
        "from ops.child import Child\n"
        "async def main():\n"
        "    child = Child('p', ['program'], dict(os.environ), print)\n"
        "    await child.start()\n"
        "    await child.wait_ready(20)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    grandchild = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(grandchild.wait, 10)
    # Its pipe is closed by its end; reading it to the end lets the transport go.
    assert await parent.stdout.read() == b""


async def test_lines_are_cut_and_split_at_carriage_returns() -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(b"10%\r20%\rdone\n" + b"x" * (3 * MAX_LINE) + b"\nlast \xff")
    stream.feed_eof()
    assert [line async for line in lines(stream)] == ["10%", "20%", "done", "x" * MAX_LINE, "last \ufffd"]


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ('ready {"a": 1}', {"a": 1}),
        ("ready", None),
        ("ready {broken", None),
        ("ready [1]", None),
        ('already {"a": 1}', None),
    ],
)
def test_parse_ready(line: str, facts: dict[str, int] | None) -> None:
    assert parse_ready(line) == facts


def test_describe_exit() -> None:
    assert describe_exit(0) == "exited with status 0"
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(-63) == "was ended by signal 63"
