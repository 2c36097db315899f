"""Lost replies, lost connections, cancelled commands: nothing is done twice, and no reply reaches the wrong caller."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.block_hash import BlockHash
from kvstore.client import Broker, BrokerConfig, connect
from kvstore.errors import BrokerUnreachable
from kvstore.jobs import Commit, Committed, Finished, Submitted
from kvstore.prefix_index import HeldChange, PrefixIndex, short
from kvstore.registry import Load
from kvstore.scripts import load_scripts
from octavo.v1 import inference_pb2

from ..conftest import names
from .conftest import LONG_TTL_MS, Stage, chunk, set_stage, until
from .proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def proxy(broker_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(broker_url) as proxy:
        yield proxy


@asynccontextmanager
async def through(proxy: Proxy, broker: Broker, command_timeout_s: float) -> AsyncIterator[Stage]:
    """The stage of ``broker``'s namespace, seen through the proxy."""
    behind = await connect(BrokerConfig(proxy.url, broker.keys.namespace, command_timeout_s=command_timeout_s))
    async with set_stage(behind, LONG_TTL_MS) as stage:
        yield stage
    await behind.close()


@pytest.fixture
async def far(proxy: Proxy, broker: Broker) -> AsyncIterator[Stage]:
    """Not even a busy machine makes a command time out."""
    async with through(proxy, broker, 5.0) as stage:
        yield stage


@pytest.fixture
async def impatient(proxy: Proxy, broker: Broker) -> AsyncIterator[Stage]:
    """For tests that wait for a command to time out."""
    async with through(proxy, broker, 0.3) as stage:
        yield stage


def lose(proxy: Proxy, script: str) -> None:
    """The reply to the next run of this script is lost; so that a run is known by the script's hash, it must have been
    loaded."""
    proxy.lose = load_scripts()[script].sha1.encode()


async def warm(stage: Stage) -> None:
    """Loads every script into the server."""
    for script in load_scripts().values():
        await stage.broker.call("SCRIPT", "LOAD", script.source)


async def test_each_script_repeated_after_a_lost_reply_says_the_same(far: Stage, proxy: Proxy, broker: Broker) -> None:
    await warm(far)
    lose(proxy, "lease")
    worker = await far.worker()
    lose(proxy, "submit")
    assert await far.submit("r1", worker) is Submitted.ACCEPTED
    assert await far.load(worker) == (1, 10)
    assert await broker.call("XLEN", broker.keys.jobs("w0")) == 1

    entries = await far.entries(worker)
    lose(proxy, "claim")
    (claim,) = await far.jobs.claim(worker.id, worker.incarnation, entries)
    assert claim.attempt == 1

    lose(proxy, "commit")
    step = [chunk("r1", 0, [1]), chunk("r1", 1, [2])]
    assert await far.commit(worker, *step) == [Commit.DUPLICATE] * 2
    assert await far.log("r1") == step

    lose(proxy, "finish")
    assert await far.jobs.cancel("r1") is Finished.ENDED
    assert len(await far.log("r1")) == 3
    assert await far.load(worker) == (0, 0)
    assert (proxy.lost, far.broker.retried) == (5, 5)


async def test_the_index_after_lost_replies(far: Stage, proxy: Proxy, broker: Broker) -> None:
    await warm(far)
    worker = await far.worker()
    index = PrefixIndex(far.broker, lease_ttl_ms=LONG_TTL_MS)
    hashes = [BlockHash(bytes([number]) * 32) for number in range(5)]
    change = HeldChange(added=tuple(map(short, hashes)))
    lose(proxy, "commit")
    assert await far.jobs.commit(worker.id, worker.incarnation, [], change) == Committed([], 5)
    lose(proxy, "match")
    assert (await index.match([worker], {"f": hashes}))["w0"].blocks == 5

    # Both calls of a replacement: the one that writes, and the one that swaps, which alone has an empty argument.
    lose(proxy, "replace")
    assert await index.replace(worker.id, worker.incarnation, change.added[:2]) == 2
    assert await index.members(worker.id, worker.incarnation) == set(change.added[:2])
    proxy.lose = b"\r\n$0\r\n\r\n"
    assert await index.replace(worker.id, worker.incarnation, change.added[3:]) == 2
    assert await index.members(worker.id, worker.incarnation) == set(change.added[3:])
    assert (proxy.lost, far.broker.retried) == (4, 4)
    assert [name for name in await names(broker) if ":held:" in name] == [broker.keys.held("w0", worker.incarnation)]


async def test_a_first_delivery_repeated_refunds_its_prompt_once(far: Stage, proxy: Proxy) -> None:
    await warm(far)
    worker = await far.worker()
    await far.submit("r1", worker, prefill=3)
    await far.submit("r2", worker, prefill=2)
    await far.claim(worker)
    lose(proxy, "commit")
    assert await far.commit(worker, chunk("r1", 0, [1])) == [Commit.DUPLICATE]
    assert (await far.registry.loads([worker]))["w0"] == Load(2, 20, 2, 2)


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        # How long each of four prompts of 3 s takes at the thief. The second waits for the first there, too.
        (0.03, ["r0", "r1"]),
        (2.0, ["r0"]),
    ],
)
async def test_a_theft_repeated_takes_only_what_starts_sooner_behind_the_first(
    far: Stage, proxy: Proxy, seconds: float, taken: list[str]
) -> None:
    """The one write that is not idempotent: what a retry takes, its thief runs."""
    await warm(far)
    worker, thief = await far.worker(prefill_tok_s=1.0), await far.worker("w1")
    for number in range(4):
        await far.submit(f"r{number}", worker, prefill=3)
    lose(proxy, "steal")
    again = await far.jobs.steal("w1", thief.incarnation, "w0", prefill_s_per_token=seconds / 3, max_look=1)
    assert again == len(taken) - 1
    loads = await far.registry.loads([worker, thief])
    left, moved = 4 - len(taken), len(taken)
    assert loads == {"w0": Load(left, 10 * left, 3 * left, left), "w1": Load(moved, 10 * moved, 3 * moved, moved)}
    assert [claim.job.request_id for claim in await far.claim(thief)] == taken


async def test_a_last_chunk_repeated(far: Stage, proxy: Proxy) -> None:
    await warm(far)
    worker = await far.worker()
    await far.running("r1", worker)
    await far.submit("r2", worker)
    last = chunk("r1", 0, [], finish=inference_pb2.LENGTH)
    lose(proxy, "commit")
    assert await far.commit(worker, last) == [Commit.DUPLICATE]
    assert await far.commit(worker, last) == [Commit.DUPLICATE]
    assert await far.log("r1") == [last]
    # Refunded once, not three times.
    assert await far.load(worker) == (1, 10)


async def test_the_ends_of_several_choices_repeated(far: Stage, proxy: Proxy) -> None:
    """In one commit, whose last chunk ends the job."""
    await warm(far)
    worker = await far.worker()
    await far.running("r1", worker, n=3)
    await far.submit("r2", worker)
    await far.commit(worker, chunk("r1", 0, [1], choice=1, finish=inference_pb2.STOP))
    step = [chunk("r1", 0, [5], choice=choice, finish=inference_pb2.LENGTH) for choice in (0, 2)]
    lose(proxy, "commit")
    assert await far.commit(worker, *step) == [Commit.DUPLICATE] * 2
    assert len(await far.log("r1")) == 3
    assert await far.load(worker) == (1, 10)


async def test_entries_of_a_lost_read_are_read_again(far: Stage, proxy: Proxy) -> None:
    worker = await far.worker()
    running = await far.running("r0", worker)
    await far.submit("r1", worker)
    proxy.lose = b"XREADGROUP"
    with pytest.raises(BrokerUnreachable):
        await far.jobs.next_entries(far.reader, worker.id, worker.incarnation, 10, 1000)
    # One at a time: the second page of what is pending goes on where the first ended.
    found = []
    for _ in range(2):
        found += await far.jobs.next_entries(far.reader, worker.id, worker.incarnation, 1, 1000)
    claims = await far.jobs.claim(worker.id, worker.incarnation, found)
    assert [claim.job.request_id for claim in claims] == ["r0", "r1"]
    # What runs already is told by its entry and attempt.
    assert (claims[0].entry_id, claims[0].attempt) == (running.entry_id, running.attempt)
    await far.submit("r2", worker)
    (new,) = await far.jobs.next_entries(far.reader, worker.id, worker.incarnation, 10, 1000)
    assert new.request_id == "r2"


async def test_entries_of_a_cancelled_read_are_read_again(far: Stage, stage: Stage, proxy: Proxy) -> None:
    worker = await far.worker()
    await far.running("r0", worker)
    await far.jobs.next_entries(far.reader, worker.id, worker.incarnation, 1, 1)
    proxy.hold()
    read = asyncio.create_task(far.jobs.next_entries(far.reader, worker.id, worker.incarnation, 10, 10_000))
    await stage.submit("r1", worker)

    async def delivered() -> bool:
        return (await stage.jobs.queues())[0].undelivered == 0

    await until(delivered)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    proxy.release()
    found = await far.jobs.next_entries(far.reader, worker.id, worker.incarnation, 10, 1000)
    assert [entry.request_id for entry in found] == ["r0", "r1"]


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
