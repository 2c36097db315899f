"""What pages of documentation show, run as a reader would: programs, and commands in a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Up

ROOT = Path(__file__).parents[2]
SERVICE = re.compile(r"octavo (up|gateway|worker) ")
"""Runs until it is ended: in a terminal of its own."""
RUN_S = 60


def blocks(page: str, kind: str) -> list[str]:
    """The page's fenced blocks of a kind (python, console), in order."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def meant(text: str, fleet: Up) -> str:
    """The same with the addresses of this fleet, where it names those of `octavo up`."""
    for port, target in zip(("50051", "50052"), fleet.facts["targets"], strict=True):
        text = text.replace(f"127.0.0.1:{port}", target)
    return text.replace("127.0.0.1:8000", fleet.facts["gateways"][0]["http"])


def run_program(program: str, fleet: Up) -> str:
    """What a program prints; it may not fail, or complain."""
    ran = subprocess.run([sys.executable, "-c", meant(program, fleet)], capture_output=True, text=True, timeout=RUN_S)
    assert (ran.returncode, ran.stderr) == (0, ""), program
    return ran.stdout


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, and what it is shown to print."""
    found = re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    assert "".join(f"$ {command}\n{shown}" for command, shown in found) == block, "a line that is no command's"
    return found


def run_block(block: str, fleet: Up) -> None:
    """Every command of a block, one after the other, on this fleet, or on the one that the block starts."""
    settings = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    settings |= {"OCTAVO_TARGET": fleet.target, "URL": fleet.redis}
    with ExitStack() as services:
        for command, shown in commands(block):
            if SERVICE.match(command):
                settings |= services.enter_context(service(command, settings))
            elif not command.startswith("redis-cli ") or shutil.which("redis-cli"):
                printed = run_command(meant(command, fleet), settings)
                assert shown in ("", printed), command


def run_command(command: str, settings: dict[str, str]) -> str:
    """What it prints; it may not fail."""
    ran = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=RUN_S, env={**os.environ, **settings}
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@contextmanager
def service(command: str, settings: dict[str, str]) -> Iterator[dict[str, str]]:
    """A process that is ready, until the end of the block; what later commands are to know of it."""
    command = command.replace("octavo up ", "octavo up --grpc-port 0 ")
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **settings},
    )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith("ready ")), None)
        assert ready is not None, f"{command} ended before it was ready"
        facts = json.loads(ready.removeprefix("ready "))
        yield {"OCTAVO_TARGET": facts["targets"][0], "URL": facts["redis"]} if "targets" in facts else {}
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(RUN_S)
        process.stdout.close()
    assert status == 0, command
