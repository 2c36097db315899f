"""How a fleet starts, fails to start, and ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from octavo.v1.inference_pb2 import GenerateRequest, Stopping
from ops.client import Client
from tests.e2e.harness import Up, octavo

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(400)

MODEL = ("--model", "simulated:4000,20")


@pytest.fixture
def up() -> Iterator[Up]:
    """A small fleet of the test's own, which the test ends."""
    started = Up.start(*MODEL, "--kv-tokens", "1024", "--grace", "20")
    try:
        yield started.until_ready()
    finally:
        started.stop()


def gone(pids: list[int], within: float) -> bool:
    """Whether all have ended in time; children of a killed parent are reaped by init, which may take a moment."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.05)
    return False


async def test_sigterm_lets_open_streams_finish(up: Up) -> None:
    request = GenerateRequest(text="A book is", stopping=Stopping(max_tokens=40, ignore_eos=True))
    pids = up.pids
    async with Client(up.target) as client:
        first = asyncio.Event()
        call = asyncio.create_task(client.generate(request, on_text=lambda _: first.set()))
        await first.wait()
        up.process.send_signal(signal.SIGTERM)
        answer = await call
        assert (answer.finish, len(answer.token_ids)) == ("LENGTH", 40)
    assert await asyncio.to_thread(up.process.wait, 30) == 0
    assert gone(pids, within=5)


async def test_a_second_signal_ends_everything_at_once(up: Up) -> None:
    request = GenerateRequest(text="A book is", stopping=Stopping(max_tokens=900, ignore_eos=True))
    pids = up.pids
    async with Client(up.target) as client:
        first = asyncio.Event()
        call = asyncio.create_task(client.generate(request, on_text=lambda _: first.set()))
        await first.wait()
        up.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(up.until_said, "draining", 10)
        up.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(up.process.wait, 10) == 130
        assert (await asyncio.gather(call, return_exceptions=True))[0] is not None
    assert gone(pids, within=5)


def test_nothing_outlives_a_killed_supervisor(up: Up) -> None:
    pids = up.pids
    assert len(pids) == 3  # broker, gateway, worker
    up.process.kill()
    up.process.wait(5)
    assert gone(pids, within=5)


def test_a_fleet_whose_broker_dies_ends_and_says_why(up: Up) -> None:
    pids = up.pids
    broker = next(
        pid for pid in pids if "valkey" in psutil.Process(pid).name() or "redis" in psutil.Process(pid).name()
    )
    psutil.Process(broker).kill()
    assert up.process.wait(10) == 1
    up.until_said(f"the embedded broker (pid {broker}) ended", 5)
    assert gone(pids, within=5)


def test_a_model_that_is_not_there_is_told_before_anything_starts() -> None:
    refused = octavo("up", "--grpc-port", "0", "--model", "/no/such/model", check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("Error: no model '/no/such/model': give ")
    assert refused.stderr.count("\n") == 1  # nothing was started


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = octavo("up", "--grpc-port", port, check=False)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith(
        f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another"
    )


def test_a_broker_that_is_not_there_is_told_without_its_password() -> None:
    refused = octavo("up", *MODEL, "--grpc-port", "0", "--redis", "redis://:secret@127.0.0.1:1/0", check=False)
    assert refused.returncode == 1
    assert "127.0.0.1:1" in refused.stderr
    assert "secret" not in refused.stderr + refused.stdout
