"""The proxy between a client and a real server."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Broker, BrokerConfig, connect
from kvstore.errors import BrokerUnreachable
from kvstore.jobs import Jobs, Submitted
from kvstore.registry import Registry, WorkerInfo, new_incarnation
from kvstore.scripts import load_scripts
from octavo.v1 import inference_pb2, job_pb2
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.chaos.proxy import Proxy
    from bench.chaos.server import Server


async def test_bytes_pass_both_ways(through: Broker) -> None:
    value = bytes(range(256)) * 20_000
    await through.call("SET", "big", value)
    assert await through.call("GET", "big") == value
    replies = await through.pipeline([("INCR", "n")] * 500)
    assert replies == list(range(1, 501))


async def test_replies_come_later_but_do_not_wait_for_each_other(proxy: Proxy, through: Broker) -> None:
    proxy.delay_s = 0.2
    began = time.monotonic()
    await through.call("PING")
    assert time.monotonic() - began >= 0.2
    listener = through.blocking()
    bell = listener.pubsub()  # type: ignore[no-untyped-call]
    await bell.subscribe("c")
    await bell.get_message(timeout=5)
    publisher = await connect(BrokerConfig(f"redis://127.0.0.1:{proxy.upstream}/0"))
    began = time.monotonic()
    for number in range(20):
        await publisher.call("PUBLISH", "c", number)
    heard = [(await bell.get_message(timeout=5))["data"] for _ in range(20)]
    assert heard == [b"%d" % number for number in range(20)]
    assert 0.2 <= time.monotonic() - began < 2.0, "20 one after the other would be 4 s"
    await bell.aclose()
    await listener.aclose()
    await publisher.close()
    proxy.heal()
    began = time.monotonic()
    await through.call("PING")
    assert time.monotonic() - began < 0.2


async def test_a_cut_holds_everything_back_and_healed_it_arrives(proxy: Proxy, through: Broker, direct: Broker) -> None:
    await through.call("PING")
    proxy.cut()
    with pytest.raises(BrokerUnreachable, match=r"did not answer in 0\.5 s"):
        await through.call("SET", "late", "command")
    with pytest.raises(BrokerUnreachable):  # on a new connection
        await through.call("PING")
    assert await direct.call("EXISTS", "late") == 0
    proxy.heal()

    async def arrived() -> bool:
        return bool(await direct.call("GET", "late") == b"command")

    # Its sender had given up long before.
    await until(arrived, within_s=5)
    assert await through.call("PING") is True


async def test_a_cut_holds_replies_back_too(proxy: Proxy, through: Broker, direct: Broker) -> None:
    waiting = through.blocking()
    popped = asyncio.ensure_future(waiting.execute_command("BLPOP", "list", 10))  # type: ignore[no-untyped-call]

    async def blocked() -> bool:
        return bool((await direct.call("INFO", "clients"))["blocked_clients"])

    await until(blocked, within_s=5)
    proxy.cut()
    await direct.call("RPUSH", "list", "x")
    assert not (await asyncio.wait({popped}, timeout=0.2))[0]
    assert await direct.call("LLEN", "list") == 0, "the server has answered"
    proxy.heal()
    assert tuple(await popped) == (b"list", b"x")
    await waiting.aclose()


async def test_reset_closes_connections_and_new_ones_work(proxy: Proxy, through: Broker) -> None:
    await through.call("PING")
    before = proxy.connections
    proxy.reset()
    with pytest.raises(BrokerUnreachable):
        await through.call("PING")
    assert await through.call("PING") is True
    assert proxy.connections == before + 1


async def test_a_server_that_came_back_elsewhere_is_found(proxy: Proxy, server: Server, through: Broker) -> None:
    await through.call("SET", "k", "v")
    before = server.port
    await server.kill()
    with pytest.raises(BrokerUnreachable):
        await through.call("PING")
    await server.start()
    assert (proxy.upstream, server.running) == (server.port, True)
    assert server.port != before or proxy.upstream == before
    assert await through.call("GET", "k") == b"v"


async def test_the_last_of_the_file_can_be_lost(server: Server, direct: Broker, namespace: str) -> None:
    await direct.call("SET", "kept", "v")
    killed = asyncio.create_task(server.kill(lose_s=0.3))
    await asyncio.sleep(0)  # from now on it is lost
    await direct.call("SET", "torn", "v")
    await killed
    await server.start()
    again = await server.connect(namespace)
    assert (await again.call("EXISTS", "kept"), await again.call("EXISTS", "torn")) == (1, 0)
    await server.kill()
    await server.start(empty=True)
    empty = await server.connect(namespace)
    assert await empty.call("DBSIZE") == 0
    await again.close()
    await empty.close()


class Stage:
    """One worker's jobs, through the proxy and with retries."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.jobs = Jobs(broker)
        self.info = WorkerInfo(id="w0", incarnation=new_incarnation(), model="m", fingerprint="f", context_length=64)

    async def submit(self, request_id: str) -> Submitted:
        job = job_pb2.Job(
            request_id=request_id, model="m", prompt_token_ids=[1], stopping=inference_pb2.Stopping(max_tokens=4), n=1
        )
        return await self.jobs.submit(
            *(job,),
            digest=b"d",
            worker="w0",
            worker_incarnation=self.info.incarnation,
            gateway="g",
            deadline_ms=None,
            max_queue=9,
        )


@pytest.fixture
async def stage(proxy: Proxy, namespace: str) -> AsyncIterator[Stage]:
    broker = await connect(BrokerConfig(proxy.url, namespace))
    stage = Stage(broker)
    await Registry(broker).register(stage.info)
    yield stage
    await broker.close()


async def test_a_reply_is_lost_after_the_command_was_applied(proxy: Proxy, stage: Stage) -> None:
    assert await stage.submit("first") is Submitted.ACCEPTED  # the script is loaded now
    lost = proxy.lose_reply(load_scripts()["submit"].sha1.encode())
    assert await stage.broker.call("GET", "unconcerned") is None
    assert not lost.done()
    retried = stage.broker.retried
    assert await stage.submit("second") is Submitted.ACCEPTED
    assert lost.done()
    assert (proxy.lost, stage.broker.retried) == (1, retried + 1)
    # It was applied before its reply was lost, and once in all.
    assert await stage.broker.call("XLEN", stage.broker.keys.jobs("w0")) == 2
    assert await stage.submit("third") is Submitted.ACCEPTED
    assert proxy.lost == 1


async def test_a_loss_that_is_asked_for_no_longer(proxy: Proxy, through: Broker) -> None:
    proxy.lose_reply(b"GET").cancel()
    assert await through.call("GET", "k") is None
    assert proxy.lost == 0
