"""deploy/users.conf on real servers: the fleet runs under it, and each role is refused what it does not need."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import TYPE_CHECKING, Any

import grpc.aio
import httpx2
import pytest

from gateway.access import Access
from kvstore import stealing
from kvstore.api_keys import ApiKey, RedisKeys, digest_of, entry_of, limits_of
from kvstore.client import BrokerConfig, connect
from kvstore.doorbell import Doorbell
from kvstore.errors import BrokerAuth, BrokerError
from kvstore.help import Call, HelpLine
from kvstore.prefix_index import PrefixIndex
from kvstore.tenants import Quota
from octavo.v1 import fleet_pb2, inference_pb2
from ops import explain, ledger, show, top
from ops.child import Child
from tests.integration.deploy.roles import ROLES, USERS
from tests.integration.gateway.harness import Client, collect, request, running_gateway, tokens
from tests.integration.gateway.scripted import ScriptedWorker, chunk
from tests.integration.worker.one_worker import running_worker
from tests.support.tiny_model import save_tiny_llama
from tests.support.waiting import until
from worker.config import PagesConfig

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.deploy.roles import Server

KEY = "{octavo:default}:"
QUOTA = Quota(requests_per_minute=100, tokens_per_minute=100_000, concurrency=10)


async def denied(server: Server) -> list[tuple[str, str, str]]:
    """What users were refused: who, and what."""
    log: list[Any] = await server.admin.call("ACL", "LOG")
    entries = [each if isinstance(each, dict) else dict(zip(each[::2], each[1::2], strict=True)) for each in log]
    names = ("username", "reason", "object")
    told = [{_text(name): _text(value) for name, value in entry.items()} for entry in entries]
    found = [(entry[names[0]], entry[names[1]], entry[names[2]]) for entry in told]
    return [each for each in found if each[2] != "client|setinfo"]  # the library's, which does without


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def test_a_fleet_needs_no_more(server: Server, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Answers, limits, pages, a cancel, a worker that leaves its job to others, and what operators look at."""
    operator, workers, gateways = (server.roles[role] for role in ("operator", "worker", "gateway"))
    model = await asyncio.to_thread(save_tiny_llama, tmp_path_factory.mktemp("tiny"))
    key = ApiKey(digest_of("k1"), "acme", operator=True)
    await RedisKeys(operator).put({**entry_of(key), **limits_of("acme", QUOTA)})
    pages = {"pages": "redis", "keys": "redis", "grpc_port": 0}
    async with (
        running_worker(
            workers, model, tmp_path, pages=PagesConfig(redis=workers.config.url), gateway=gateways
        ) as fleet,
        running_gateway(gateways, **pages) as (_, ready, _),
    ):
        client = Client(ready.grpc, Access(api_key="k1"))
        prompt = [2 + index % 200 for index in range(100)]
        for name in ("r1", "r2"):
            assert len(tokens(await collect(client.generate(request(name, prompt=prompt, max_tokens=8))))) >= 1
        assert (await client.explain(fleet_pb2.ExplainRequest(request_id="acme/r2"))).cached_tokens >= 96
        call = client.generate(request("r3", prompt=prompt, max_tokens=400))
        await call.read()
        await client.cancel(inference_pb2.CancelRequest(request_id="r3"))
        await collect(call)
        await fleet.idle()
        assert (await client.ledger(fleet_pb2.LedgerRequest())).accepted == 3
        assert (await explain.from_redis(server.by("operator"), "default", "acme/r2")) is not None
        assert [row["id"] for row in await show.workers_from_redis(server.by("operator"), "default")] == ["w0"]
        assert len(await show.queues_from_redis(server.by("operator"), "default")) == 1
        assert (await ledger.from_redis(server.by("operator"), "default")).accepted == 3
        watching = top.Redis(server.by("operator"), "default")
        assert (await watching.read()).ledger["accepted"] == 3
        await watching.close()
        await client.channel.close()
    assert await denied(server) == []


async def test_workers_that_come_and_go_need_no_more(server: Server) -> None:
    """A job moves to another worker, and is given up there; and what workers ask each other."""
    first, second = ScriptedWorker(server.roles["worker"], "w0"), ScriptedWorker(server.roles["worker"], "w1")
    await first.start()
    async with running_gateway(server.roles["gateway"]) as (_, _, client):
        call = client.generate(request("r1"))
        (claim,) = await first.claim()
        await first.commit(chunk(claim, 0, [10]))
        await second.start()
        await exchange(second, first)
        await first.stop()
        (claim,) = await second.claim()
        assert (claim.next, claim.attempt) == ((1,), 2)
        await second.commit(chunk(claim, 1, [11], finish=inference_pb2.STOP))
        assert tokens(await collect(call)) == [10, 11]
        call = client.generate(request("r2"))
        await second.claim()
        await server.admin.call("HSET", f"{KEY}job:r2", "fruitless", 9)
        await second.stop()
        with pytest.raises(grpc.aio.AioRpcError, match="10 workers in a row ran it"):
            await collect(call)
        assert [each.request_id for each in (await client.list_dead(fleet_pb2.ListDeadRequest())).jobs] == ["r2"]
        await client.list_dead(fleet_pb2.ListDeadRequest(request_id="r2"))
        for request_id in ("r2", ""):
            await client.drop_dead(fleet_pb2.DropDeadRequest(request_id=request_id))
    assert await denied(server) == []


async def test_batches_need_no_more(server: Server, tmp_path: Path) -> None:
    """From a file by HTTP to its answers: the gateway makes the batch, and who runs it its job of rq."""
    worker = ScriptedWorker(server.roles["worker"], "w0")
    await worker.start()
    worker.serve()
    folder = str(tmp_path / "batches")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 3}}
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    async with running_gateway(server.roles["gateway"], http_port=0, batches=folder) as (_, ready, _):
        where = {"OCTAVO_REDIS": server.by("batch"), "OCTAVO_TARGET": ready.grpc, "OCTAVO_BATCHES": folder}
        runner = Child("b0", ("ops.cli", "batch", "worker"), {**os.environ, **where}, lambda *_: None)
        await runner.start()
        async with httpx2.AsyncClient(base_url=f"http://{ready.http}/v1", trust_env=False) as http:
            form: Any = {"file": ("a.jsonl", json.dumps(line).encode())}
            file = (await http.post("/files", data={"purpose": "batch"}, files=form)).json()
            made = (await http.post("/batches", json={**body, "input_file_id": file["id"]})).json()

            async def completed() -> bool:
                told = (await http.get(f"/batches/{made['id']}")).json()
                return bool(told["status"] == "completed" and told["request_counts"]["completed"] == 1)

            await until(completed, within_s=30)
            assert len((await http.get("/batches")).json()["data"]) == 1
        assert await runner.stop(10)
    await worker.stop()
    assert await denied(server) == []


async def exchange(thief: ScriptedWorker, victim: ScriptedWorker) -> None:
    """What a worker does about another one's jobs, and about its own part of the prefix index."""
    broker, info = thief.broker, thief.info
    line = HelpLine(broker, info.fingerprint)
    await line.open()
    await line.call(Call("w0", 1.0, 1.0))
    await line.unread(victim.info.id, victim.info.incarnation)
    await line.close()
    await stealing.peek(broker, "w0")
    await thief.jobs.steal(info.id, info.incarnation, "w0", prefill_s_per_token=0.1)
    index = PrefixIndex(broker)
    for held in ({b"h" * 16}, set()):
        await index.replace(info.id, info.incarnation, held)
        assert await index.members(info.id, info.incarnation) == held


REFUSED = {
    "gateway": [
        ("HSET", f"{KEY}keys", "f", "v"),
        ("DEL", f"{KEY}keys"),
        ("HSET", f"{KEY}model:f", "f", "v"),
        ("SET", f"{KEY}page:f:h", "v"),
        ("XREADGROUP", "GROUP", "workers", "i", "STREAMS", f"{KEY}jobs:w0", ">"),
        ("HSET", "rq:job:j", "data", "v"),
        ("RPUSH", f"rq:queue:{KEY}batches:queue", "j"),
    ],
    "worker": [
        ("HGETALL", f"{KEY}keys"),
        ("HSET", f"{KEY}keys", "f", "v"),
        ("HGETALL", f"{KEY}dead:jobs"),
        ("XRANGE", f"{KEY}routes", "-", "+"),
        ("SET", f"{KEY}gateway:i", "v"),
        ("DEL", f"{KEY}suspect:w0"),
    ],
    "batch": [
        ("HGETALL", f"{KEY}keys"),
        ("HSET", f"{KEY}keys", "f", "v"),
        ("HGETALL", f"{KEY}job:r"),
        ("XRANGE", f"{KEY}log:r", "-", "+"),
        ("XADD", f"{KEY}jobs:w0", "*", "f", "v"),
        ("PUBLISH", f"{KEY}channel:i", "r"),
    ],
    "operator": [
        ("DEL", f"{KEY}keys"),
        ("HSET", f"{KEY}job:r", "f", "v"),
        ("HDEL", f"{KEY}dead:jobs", "r"),
        ("XDEL", f"{KEY}jobs:w0", "1-0"),
        ("PUBLISH", f"{KEY}channel:i", "r"),
    ],
}
"""Beside what nobody of them may."""
NOBODY_MAY = (
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("ACL", "LIST"),
    ("SHUTDOWN",),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("GET", "mine"),
    ("SET", "mine", "v"),
    ("SCRIPT", "FLUSH"),
)


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_is_refused_what_it_does_not_need(server: Server, role: str) -> None:
    broker = server.roles[role]
    for command in (*NOBODY_MAY, *REFUSED[role]):
        with pytest.raises(BrokerAuth):
            await broker.call(*command)
    # Nor by a script, whether it says so or not.
    for command in REFUSED[role]:
        arguments = ", ".join(f"'{part}'" for part in command)
        script = f"return redis.call({arguments})"
        with pytest.raises(BrokerError, match=r"(?i)permission|ACL|user executing the script can't"):
            await broker.call("EVAL", script, 0)


@pytest.mark.parametrize(("role", "channel"), [("gateway", "help:f"), ("gateway", "x"), ("worker", "x")])
async def test_a_role_hears_what_it_is_told_alone(server: Server, role: str, channel: str) -> None:
    bell = Doorbell(server.roles[role])
    with pytest.raises(BrokerAuth):
        await bell.open(KEY + channel)
    await bell.close()


async def test_nobody_comes_in_without_a_name_and_its_password(server: Server) -> None:
    for url in (server.url, server.by("worker").replace("secret-of-worker", "secret-of-gateway")):
        with pytest.raises(BrokerAuth):
            await connect(BrokerConfig(url))


def test_every_command_is_one_that_scripts_or_clients_send() -> None:
    """Nothing is allowed that nothing needs."""
    root = USERS.parents[1] / "kvstore"
    sent = {word for file in root.rglob("*.py") for word in re.findall(r"\"([A-Z_]+)[A-Z ]*\"", file.read_text())}
    sent |= {word for file in (root / "lua").iterdir() for word in re.findall(r"'([A-Z]+)'", file.read_text())}
    implied = {"SUBSCRIBE", "UNSUBSCRIBE", "SMEMBERS"}  # by the library
    for role, line in re.findall(r"^user (\w+) on (.*)$", USERS.read_text(), re.MULTILINE):
        allowed = {word.partition("|")[0].upper() for word in re.findall(r" \+(\S+)", line)}
        of_rq = {"@READ", "@WRITE", "@TRANSACTION", "SCRIPT", "CLIENT"} if role == "batch" else set[str]()
        assert allowed <= sent | implied | of_rq, role
