"""Lost replies and cancelled reads: nothing is done twice, and nothing is left out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import BlockHash
from kvstore.errors import BrokerUnreachable
from kvstore.jobs import Commit, Committed, Finished, Rehomed, Submitted, Target
from kvstore.prefix_index import HeldChange, PrefixIndex, short
from kvstore.registry import Load
from kvstore.scripts import load_scripts
from octavo.v1 import inference_pb2

from ..conftest import names
from .conftest import LONG_TTL_MS, Stage, chunk, until

if TYPE_CHECKING:
    from kvstore.client import Broker

    from .proxy import Proxy


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


async def test_a_move_repeated_moves_once(far: Stage, proxy: Proxy, broker: Broker) -> None:
    await warm(far)
    worker, other = await far.worker(), await far.worker("w1")
    await far.running("r1", worker)
    await far.registry.leave(worker.id, worker.incarnation)
    (orphan,) = await far.jobs.orphans()
    target = Target("w1", other.incarnation, 3, 0)
    lose(proxy, "rehome")
    assert await far.jobs.rehome(orphan, target) is Rehomed.MOVED
    assert await broker.call("XLEN", broker.keys.jobs("w1")) == 1
    assert (await far.registry.loads([worker, other])) == {"w0": Load(), "w1": Load(1, 10, 3, 1)}
    # By somebody else, it is not his.
    assert await far.jobs.rehome(orphan, target) is Rehomed.STALE
    assert proxy.lost == 1


@pytest.mark.parametrize("deaths", [0, 3])
async def test_an_end_without_a_worker_repeated(far: Stage, proxy: Proxy, broker: Broker, deaths: int) -> None:
    await warm(far)
    worker = await far.worker()
    await far.running("r1", worker)
    await broker.call("HSET", broker.keys.job("r1"), "deaths", deaths, "fruitless", deaths)
    await broker.call("HSET", broker.keys.orphaned(worker.id), f"{worker.incarnation} left", 1)
    await far.registry.leave(worker.id, worker.incarnation)
    (orphan,) = await far.jobs.orphans()
    lose(proxy, "rehome")
    assert await far.jobs.rehome(orphan, None) is (Rehomed.DEAD if deaths else Rehomed.ENDED)
    assert len(await far.log("r1")) == 1
    assert await broker.call("HLEN", broker.keys.dead) == (1 if deaths else 0)
    assert (await far.jobs.ledger()).holds
    assert proxy.lost == 1


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


async def test_entries_of_a_lost_read_are_read_again(far: Stage, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.entries.PENDING_AT_ONCE", 1)
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
