"""What a gateway and a worker log as JSON: every line an object, what is about a job with its id, and no secrets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvstore.client import BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker
from octavo.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, Stopping
from ops.client import Client
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path as Folder

ROOT = Path(__file__).parents[3]
WORDS, SALT, KEY = "swordfish", "tenant-of-the-salt", "the-brokers-password"


@asynccontextmanager
async def process(*arguments: str, redis: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    """One of ours, and what its ready line tells. Killed at the end."""
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}", "OCTAVO_LOG_FORMAT": "json", "OCTAVO_REDIS": redis}
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **own},
    )
    try:
        assert started.stdout is not None
        line = (await asyncio.wait_for(started.stdout.readline(), 30)).decode()
        yield started, json.loads(line.removeprefix("ready "))
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def logged(started: asyncio.subprocess.Process) -> list[dict[str, Any]]:
    """All that it has logged, once it is dead."""
    started.kill()
    said, told = await started.communicate()
    assert not any(secret.encode() in said + told for secret in (WORDS, SALT, KEY))
    return [json.loads(line) for line in told.splitlines()]


def request(request_id: str, **more: Any) -> GenerateRequest:
    stopping = Stopping(max_tokens=2, ignore_eos=True)
    return GenerateRequest(request_id=request_id, cache_salt=SALT, stopping=stopping, **more)


async def test_lines_are_objects_that_name_jobs_and_hold_no_secrets(broker_binary: Folder) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedBroker(binary=broker_binary))
        broker = await connect(BrokerConfig(server.url))
        stack.push_async_callback(broker.close)
        await broker.call("CONFIG SET", "requirepass", KEY)
        url = server.url.replace("redis://", f"redis://:{KEY}@")
        (worker, worker_ready), (gateway, gateway_ready) = await asyncio.gather(
            stack.enter_async_context(process("worker", "--model", "simulated:100000,1", "--id", "w0", redis=url)),
            stack.enter_async_context(process("gateway", "--grpc-port", "0", redis=url)),
        )
        client = await stack.enter_async_context(Client(gateway_ready["grpc"]))
        chat = Chat(messages=[ChatMessage(role="user", content=WORDS)])
        assert (await client.generate(request("whole", chat=chat), timeout=20)).finish == "LENGTH"
        # A job that somebody damages before its worker has read it.
        worker.send_signal(signal.SIGSTOP)
        asked = asyncio.create_task(client.generate(request("broken", text=WORDS), timeout=20))

        async def accepted() -> bool:
            return bool(await broker.call("EXISTS", broker.keys.job("broken")))

        await until(accepted, within_s=10)
        await broker.call("HSET", broker.keys.job("broken"), "payload", b"\xff" + WORDS.encode())
        worker.send_signal(signal.SIGCONT)
        with pytest.raises(grpc.aio.AioRpcError):
            await asked
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await client.generate(request("late", text=WORDS), timeout=20)
        by_worker, by_gateway = await logged(worker), await logged(gateway)
    for lines, role, ready in ((by_worker, "worker", worker_ready), (by_gateway, "gateway", gateway_ready)):
        assert lines
        assert {each["role"] for each in lines} == {role}
        assert {each["incarnation"] for each in lines} == {ready["incarnation"]}
        assert {each["level"] for each in lines} <= {"INFO", "WARNING", "ERROR"}
        assert all({"time", "logger", "message"} <= each.keys() for each in lines)
    assert {each["worker"] for each in by_worker} == {"w0"}
    assert [each["logger"] for each in by_worker if each.get("request_id") == "broken"] == ["kvstore.endings"]
    told = sorted(each["logger"] for each in by_gateway if each.get("request_id") == "late")
    assert told == ["gateway.ending", "gateway.errors"]
    assert not [each for each in (*by_worker, *by_gateway) if each.get("request_id") == "whole"]
