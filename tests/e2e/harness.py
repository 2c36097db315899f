"""The installed command, and fleets that it runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import psutil

from ops.answer import Answer
from worker.model.loader import choose_device, choose_dtype

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo.v1 import inference_pb2
    from ops.client import Client

OCTAVO = str(Path(sys.executable).with_name("octavo"))
DTYPE = str(choose_dtype("auto", choose_device("auto"))).removeprefix("torch.")
"""Of fleets on this machine that are told none."""
START_S = 300
"""Includes preparing the model on a machine that never did."""


def octavo(*arguments: str, timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    ran = subprocess.run([OCTAVO, *arguments], capture_output=True, text=True, timeout=timeout)
    if check:
        assert ran.returncode == 0, f"{ran.args} exited with {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran


@dataclass
class Up:
    """A running `octavo up`."""

    process: subprocess.Popen[str]
    facts: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    _more: threading.Condition = field(default_factory=threading.Condition)
    _readers: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def start(cls, *arguments: str, **variables: str) -> Up:
        process = subprocess.Popen(
            [OCTAVO, "up", "--grpc-port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        up = cls(process)
        for stream in (process.stdout, process.stderr):
            up._readers.append(threading.Thread(target=up._read, args=(stream,), daemon=True))
            up._readers[-1].start()
        return up

    @property
    def target(self) -> str:
        return str(self.facts["targets"][0])

    @property
    def redis(self) -> str:
        return str(self.facts["redis"])

    @property
    def pids(self) -> list[int]:
        """Of all its processes, the broker too."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def until(self, what: Callable[[], bool], timeout: float = START_S) -> None:
        """Waits until what it said makes `what` true, or it ended."""
        deadline = time.monotonic() + timeout
        with self._more:
            while not what():
                left = deadline - time.monotonic()
                ended = self.process.poll() is not None and not any(reader.is_alive() for reader in self._readers)
                assert left > 0, "\n".join(self.said)
                assert not ended, "\n".join(self.said)
                self._more.wait(min(left, 1.0))

    def until_ready(self) -> Up:
        self.until(lambda: bool(self.facts))
        return self

    def until_said(self, text: str, timeout: float = START_S) -> None:
        self.until(lambda: any(text in line for line in self.said), timeout)

    def stop(self, timeout: float = 60) -> int:
        """Ends it as an operator does, and checks that nothing is left. Returns the exit status."""
        left = self.pids if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join(5)
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()
        assert not [pid for pid in left if psutil.pid_exists(pid)]
        return status

    def _read(self, stream: Any) -> None:
        for line in stream:
            with self._more:
                if line.startswith("ready {"):
                    self.facts = json.loads(line.removeprefix("ready "))
                else:
                    self.said.append(line.rstrip())
                self._more.notify_all()
        with self._more:
            self._more.notify_all()


@dataclass
class Stream:
    """A call that is being read."""

    answer: Answer = field(default_factory=Answer)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    error: grpc.aio.AioRpcError | None = None
    ended_at: float = 0.0
    heard_at: list[float] = field(default_factory=list)
    """When each response came."""

    @property
    def worker(self) -> str:
        assert self.answer.route is not None
        return str(self.answer.route.worker)

    def longest_pause(self, since: float) -> float:
        """Seconds between two responses at most, of those that came after `since`."""
        times = [since, *(each for each in self.heard_at if each > since)]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    async def read(self, client: Client, request: inference_pb2.GenerateRequest) -> None:
        try:
            async for response in client.responses(request, timeout=300):
                self.heard_at.append(time.monotonic())
                self.answer.add(response, self.heard_at[-1])
                self.first.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        self.ended_at = time.monotonic()


async def eventually(holds: Callable[[], Awaitable[bool]], timeout: float) -> None:
    """Asks again and again: what a fleet tells is the state at its last heartbeat, and nobody announces the next."""
    async with asyncio.timeout(timeout):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
