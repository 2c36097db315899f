"""`octavo top` in a terminal, on real gateways: what it shows, what it does when one goes away, and how it ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from click.testing import CliRunner

from ops import top
from tests.integration.gateway.harness import collect, request, running_gateway

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client import Broker
    from tests.integration.gateway.scripted import ScriptedWorker

ROOT = Path(__file__).parents[3]
LEAVES = "<the screen as it was before>"
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Screen:
    """A terminal of 60 columns in which the command runs."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self.seen = ""
        self._terminal = terminal
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(terminal, self._read)

    async def until(self, text: str) -> None:
        """Until the text has been drawn since the last call."""
        async with asyncio.timeout(20):
            while text not in self.seen:
                self._more.clear()
                await self._more.wait()
        self.seen = self.seen.partition(text)[2]

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 10)

    def _read(self) -> None:
        try:
            drawn = os.read(self._terminal, 1 << 16).decode(errors="replace")
            self.seen += CONTROLS.sub("", drawn.replace("\x1b[?1049l", LEAVES))
        except OSError:  # the other side is closed
            asyncio.get_running_loop().remove_reader(self._terminal)
        self._more.set()


@contextmanager
def terminal(*arguments: str) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "ops.cli", "top", "--interval", "0.1", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}", "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        yield Screen(process, ours)
    finally:
        process.kill()
        process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)


async def test_a_gateway_that_goes_away_is_told_of_and_it_goes_on_at_the_next(
    broker: Broker, worker: ScriptedWorker
) -> None:
    async with running_gateway(broker) as (_, second, _), AsyncExitStack() as stack:
        _, first, client = await stack.enter_async_context(running_gateway(broker))
        call = client.generate(request("r1"))
        await call.initial_metadata()
        with terminal("--target", f"{first.grpc},{second.grpc}") as screen:
            await screen.until(f"octavo top: {first.grpc}, 1 worker")
            await screen.until("w0      ready")
            await screen.until("1+0")
            await screen.until("ledger: accepted 1, in flight 1, adds up")
            (claim,) = await worker.claim()
            await worker.answer(claim)
            await collect(call)
            await screen.until("ledger: accepted 1, finished 1, adds up")
            await stack.aclose()
            await screen.until(f"{first.grpc}: UNAVAILABLE")
            await screen.until(f"octavo top: {second.grpc}, 1 worker")
            await screen.until("w0      ready")
            screen.process.send_signal(signal.SIGINT)
            assert await screen.exit_code() == 0
            await screen.until(LEAVES)
            assert "interrupted" not in screen.seen


async def test_scripts_get_the_same_from_a_gateway_and_from_redis(broker: Broker, worker: ScriptedWorker) -> None:
    worker.info = replace(worker.info, running=3, max_running=4, steps=7, output_tokens=50, blocks_used=2)
    await worker.registry.renew(worker.info)
    url, namespace = broker.config.url, broker.config.namespace
    async with running_gateway(broker) as (_, ready, _):
        told = []
        for source in (("--target", ready.grpc), ("--redis", url, "--namespace", namespace)):
            ran = await asyncio.to_thread(CliRunner().invoke, top.command, ["--once", "--json", *source])
            assert ran.exit_code == 0, ran.output
            told.append(json.loads(ran.output))
    for shown in told:
        (row,) = shown["workers"]
        assert 0 <= row.pop("heartbeat_age_s") < 5
        assert shown["total"]["running"] == 3
    assert told[0] == told[1]
    assert (row["worker"], row["running"], row["max_running"], row["blocks_total"]) == ("w0", 3, 4, 2)
    # Its heartbeats tell of no more work, so what it did between two of them is nothing.
    assert (row["output_tok_s"], row["busy"], row["step_ms"]) == (0.0, 0.0, None)
