"""Silence, lost connections, cancelled commands: each has an end, and no reply reaches the wrong caller."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Broker, BrokerConfig, connect
from kvstore.errors import BrokerUnreachable

if TYPE_CHECKING:
    from .conftest import Stage
    from .proxy import Proxy


async def test_silence_is_an_error_after_the_timeout(impatient: Stage, proxy: Proxy) -> None:
    proxy.hold()
    with pytest.raises(BrokerUnreachable):
        await impatient.broker.call("PING", retry=False)
    proxy.release()
    assert await impatient.broker.call("PING") is True


async def test_a_blocking_read_outlives_the_command_timeout(impatient: Stage) -> None:
    """Not so with the client's default socket timeout, which ends silence with an error."""
    worker, jobs, reader = await impatient.worker(), impatient.jobs, impatient.reader
    await jobs.next_entries(reader, worker.id, worker.incarnation, 1, 1)
    started = asyncio.get_running_loop().time()
    assert await jobs.next_entries(reader, worker.id, worker.incarnation, 1, 600) == []
    assert asyncio.get_running_loop().time() - started > 0.5


async def test_idle_reads_can_be_cancelled_again_and_again(far: Stage) -> None:
    worker = await far.worker()
    await far.jobs.next_entries(far.reader, worker.id, worker.incarnation, 1, 1)
    for _ in range(50):
        read = asyncio.create_task(far.jobs.next_entries(far.reader, worker.id, worker.incarnation, 1, 60_000))
        await asyncio.sleep(0.005)
        read.cancel()
        async with asyncio.timeout(2):
            with pytest.raises(asyncio.CancelledError):
                await read
    await far.running("r1", worker)


async def test_a_blocking_read_of_a_dead_server_ends(impatient: Stage, proxy: Proxy) -> None:
    worker, jobs, reader = await impatient.worker(), impatient.jobs, impatient.reader
    await jobs.next_entries(reader, worker.id, worker.incarnation, 1, 1)
    proxy.hold()
    with pytest.raises(BrokerUnreachable):
        await jobs.next_entries(reader, worker.id, worker.incarnation, 1, 100)


async def test_cut_connections_are_made_again(far: Stage, proxy: Proxy) -> None:
    for _ in range(5):
        proxy.cut()
        assert await far.broker.call("ECHO", "here") == b"here"


async def test_no_reply_reaches_the_next_command(far: Stage, proxy: Proxy) -> None:
    """Commands are cancelled at random moments: while they wait for a connection, send, or wait for the reply."""
    dice = random.Random(1)
    proxy.delay_s = 0.002
    cancelled, round_s = 0, 0.0

    async def one(number: int) -> None:
        nonlocal cancelled
        kind = number % 3
        if kind == 0:
            command = far.broker.call("ECHO", number)
        elif kind == 1:
            command = far.broker.pipeline([("ECHO", f"{number}-{part}") for part in range(3)])
        else:
            command = far.broker.call("EVAL", "return ARGV[1]", 0, number)
        task: asyncio.Future[Any] = asyncio.ensure_future(command)
        await asyncio.sleep(dice.uniform(0, 1.5) * round_s)
        task.cancel()
        try:
            reply = await task
        except asyncio.CancelledError:
            cancelled += 1
            return
        if kind == 1:
            assert reply == [f"{number}-{part}".encode() for part in range(3)]
        else:
            assert reply == str(number).encode()

    for start in range(0, 600, 20):
        # What it takes now, on a machine that may be busy, so that some are cancelled and some are not.
        began = time.perf_counter()
        await asyncio.gather(*(far.broker.call("ECHO", number) for number in range(20)))
        round_s = time.perf_counter() - began
        await asyncio.gather(*(one(number) for number in range(start, start + 20)))
    assert 50 < cancelled < 590
    # Nothing is left in the pool that answers for another, and no connection was lost to it.
    replies = await asyncio.gather(*(far.broker.call("ECHO", number) for number in range(200)))
    assert replies == [str(number).encode() for number in range(200)]


async def test_a_burst_waits_for_its_turn(broker_url: str, namespace: str) -> None:
    broker = await connect(BrokerConfig(broker_url, namespace, max_connections=4))
    replies = await asyncio.gather(*(broker.call("ECHO", number) for number in range(500)))
    assert replies == [str(number).encode() for number in range(500)]
    clients = await broker.call("CLIENT", "LIST")
    assert clients.count(b"\n") < 20
    await broker.close()


async def test_a_closed_broker_says_so(broker_url: str, namespace: str) -> None:
    broker = await connect(BrokerConfig(broker_url, namespace))
    await broker.close()
    await broker.close()
    with pytest.raises(BrokerUnreachable, match="closed"):
        await broker.call("PING")


async def test_a_broker_that_is_closed_while_it_connects_keeps_no_connection(broker_url: str, namespace: str) -> None:
    """The moment that matters is that in which a socket is opened: it is closed at each turn of the loop up to it."""
    for turns in range(12):
        broker = Broker(BrokerConfig(broker_url, namespace))
        call = asyncio.create_task(broker.call("PING", retry=False))
        for _ in range(turns):
            await asyncio.sleep(0)
        await broker.close()
        await asyncio.wait([call], timeout=5)
        assert call.done()
        call.exception()  # it may have had its answer before
        pool = broker.commands.connection_pool
        assert [each for each in pool._available_connections if each.is_connected] == [], turns
        assert not pool._in_use_connections


async def test_a_cancelled_command_is_cancelled_even_when_its_reply_is_there(broker: Broker) -> None:
    """The moment that matters is the turn of the loop in which the reply arrives, so it is tried at many of them."""
    dice = random.Random(2)
    in_flight = 0
    for _ in range(600):
        task: asyncio.Future[Any] = asyncio.ensure_future(broker.call("ECHO", "x"))
        await asyncio.sleep(dice.uniform(0, 0.0008))
        if task.done():
            continue
        in_flight += 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert in_flight > 20


async def test_a_cancelled_task_may_still_clean_up(broker: Broker) -> None:
    waiting = asyncio.Event()
    replies: list[bytes] = []

    async def work() -> None:
        try:
            waiting.set()
            await asyncio.get_running_loop().create_future()
        finally:
            replies.append(await broker.call("ECHO", "bye"))

    task = asyncio.create_task(work())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert replies == [b"bye"]
