"""Who holds what: written with commits, found in one call, gone with its incarnation."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.block_hash import BlockHash, chain, root
from kvstore.jobs import Commit, Committed, Finished, Rehomed
from kvstore.prefix_index import BATCH, HeldChange, PrefixIndex, Seen, short
from kvstore.registry import Load, Renewed
from octavo.v1 import inference_pb2

from .conftest import LONG_TTL_MS, SHORT_TTL_MS, Stage, chunk, until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.client import Broker
    from kvstore.registry import WorkerInfo


@pytest.fixture
def index(broker: Broker) -> PrefixIndex:
    return PrefixIndex(broker, lease_ttl_ms=LONG_TTL_MS)


def prompt(blocks: int, salt: str = "") -> list[BlockHash]:
    """Hashes of a prompt of so many blocks of one token."""
    return chain(root("f", 1, salt), range(blocks), 1)


def shorts(hashes: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(map(short, hashes))


def added(hashes: Iterable[bytes]) -> HeldChange:
    return HeldChange(added=shorts(hashes))


async def put(stage: Stage, worker: WorkerInfo, change: HeldChange) -> Committed:
    return await stage.jobs.commit(worker.id, worker.incarnation, [], change)


async def blocks(index: PrefixIndex, worker: WorkerInfo, hashes: list[BlockHash]) -> int:
    return (await index.match([worker], {"f": hashes}))[worker.id].blocks


async def test_every_length_of_every_prompt_is_found(stage: Stage, index: PrefixIndex) -> None:
    worker, dice = await stage.worker(), random.Random(1)
    for length in (1, 2, 3, 7, 8, 33):
        whole = prompt(length, salt=str(length))
        for held in range(length + 1):
            others = shorts(prompt(dice.randrange(5), salt="another"))
            assert await index.replace("w0", worker.incarnation, {*shorts(whole[:held]), *others}) >= held
            assert await blocks(index, worker, whole) == held, (length, held)


async def test_many_workers_in_one_call(stage: Stage, index: PrefixIndex) -> None:
    """Whatever was found of those before, each gets its own depth."""
    whole, dice = prompt(100), random.Random(2)
    workers = [await stage.worker(f"w{number}") for number in range(30)]
    held = [dice.choice([0, 1, 2, 50, 50, 51, 99, 100, dice.randrange(101)]) for _ in workers]
    for worker, depth in zip(workers, held, strict=True):
        await index.replace(worker.id, worker.incarnation, shorts(whole[:depth]))
    calls = stage.broker.spent.read().get("match", (0, 0.0))[0]
    found = await index.match(workers, {"f": whole})
    assert [found[worker.id].blocks for worker in workers] == held
    assert stage.broker.spent.read()["match"].times == calls + 1
    # A shorter prompt that begins alike.
    found = await index.match(workers, {"f": whole[:50]})
    assert [found[worker.id].blocks for worker in workers] == [min(depth, 50) for depth in held]
    assert await index.match([], {"f": whole}) == {}


async def test_each_fingerprint_has_hashes_of_its_own(stage: Stage, index: PrefixIndex) -> None:
    workers = [await stage.worker(f"w{number}", fingerprint=name) for number, name in enumerate("fgh")]
    chains = {name: chain(root(name, 1), range(6), 1) for name in "fgh"}
    for number, worker in enumerate(workers):
        await index.replace(worker.id, worker.incarnation, shorts(chains[worker.fingerprint][: 2 + number]))
    seen = await index.match(workers, {"f": chains["f"], "g": chains["g"]})
    assert {worker: each.blocks for worker, each in seen.items()} == {"w0": 2, "w1": 3, "w2": 0}
    # Another's hashes, or none at all, are no hit.
    seen = await index.match(workers, {"f": chains["g"], "g": [], "h": chains["h"]})
    assert {worker: each.blocks for worker, each in seen.items()} == {"w0": 0, "w1": 0, "w2": 4}


async def test_loads_come_with_it(stage: Stage, index: PrefixIndex) -> None:
    worker, idle = await stage.worker(), await stage.worker("w1")
    await stage.submit("r1", worker, n=4, prompt=range(40), prefill=8, predicted=32)
    await index.replace("w0", worker.incarnation, shorts(prompt(2)))
    assert await index.match([worker, idle], {"f": prompt(3)}) == {
        "w0": Seen(2, Load(1, 68, 8, 4)),
        "w1": Seen(0, Load()),
    }


async def test_held_blocks_go_along_with_a_commit(stage: Stage, index: PrefixIndex) -> None:
    worker, whole = await stage.worker(), prompt(6)
    await stage.running("r1", worker)
    first = HeldChange(added=shorts(whole[:4]))
    step = [chunk("r1", 0, [5])]
    answer = await stage.jobs.commit("w0", worker.incarnation, step, first)
    assert answer == Committed([Commit.WRITTEN], 4)
    assert await blocks(index, worker, whole) == 4
    # Repeated after a lost reply, nothing changes.
    assert await stage.jobs.commit("w0", worker.incarnation, step, first) == Committed([Commit.DUPLICATE], 4)

    change = HeldChange(added=shorts(whole[4:5]), removed=shorts(whole[2:4]))
    assert await put(stage, worker, change) == Committed([], 3)
    assert await index.members("w0", worker.incarnation) == {*shorts(whole[:2]), *shorts(whole[4:5])}
    assert await put(stage, worker, HeldChange()) == Committed([], 3)
    last = [chunk("r1", 1, [6], finish=inference_pb2.STOP)]
    assert await stage.jobs.commit("w0", worker.incarnation, last) == Committed([Commit.WRITTEN], 3)
    # Nothing to tell is no call.
    assert await stage.jobs.commit("w0", worker.incarnation, []) == Committed([], None)


async def test_changes_of_any_size(stage: Stage, index: PrefixIndex) -> None:
    """More than Lua can unpack, and than one call takes."""
    worker = await stage.worker()
    whole = prompt(2 * BATCH + 5)
    await stage.running("r1", worker)
    answer = await stage.jobs.commit("w0", worker.incarnation, [chunk("r1", 0, [5])], added(whole))
    assert answer == Committed([Commit.WRITTEN], len(whole))
    assert await blocks(index, worker, whole) == len(whole)
    assert await index.members("w0", worker.incarnation) == set(shorts(whole))
    tail = HeldChange(removed=shorts(reversed(whole[3:])))
    assert await put(stage, worker, tail) == Committed([], 3)
    assert await index.replace("w0", worker.incarnation, shorts(whole[:-1])) == len(whole) - 1
    assert await index.members("w0", worker.incarnation) == set(shorts(whole[:-1]))


async def test_replacing_takes_what_is_wrong_away(stage: Stage, index: PrefixIndex, broker: Broker) -> None:
    worker, whole = await stage.worker(), prompt(10)
    await put(stage, worker, added(whole))
    assert await index.replace("w0", worker.incarnation, shorts(whole[:2])) == 2
    assert await index.members("w0", worker.incarnation) == set(shorts(whole[:2]))
    held = broker.keys.held("w0", worker.incarnation)
    assert 3 * LONG_TTL_MS < await broker.call("PTTL", held) <= 4 * LONG_TTL_MS
    assert await index.replace("w0", worker.incarnation, ()) == 0
    assert await broker.call("EXISTS", held) == 0
    assert await index.replace("w0", worker.incarnation, ()) == 0
    assert await index.members("w0", worker.incarnation) == set()


async def test_nobody_sees_a_part_of_a_set_that_is_written_anew(stage: Stage, index: PrefixIndex) -> None:
    worker, whole = await stage.worker(), prompt(3 * BATCH)
    await index.replace("w0", worker.incarnation, shorts(whole[:10]))
    seen = [await blocks(index, worker, whole)]

    async def look() -> None:
        while seen[-1] == 10:
            seen.append(await blocks(index, worker, whole))

    looking = asyncio.create_task(look())
    await asyncio.gather(*(index.replace("w0", worker.incarnation, shorts(whole)) for _ in range(3)))
    await looking
    assert set(seen) == {10, len(whole)}


async def test_it_lives_with_the_lease(brief: Stage, broker: Broker) -> None:
    worker = await brief.worker()
    held = broker.keys.held("w0", worker.incarnation)
    assert await brief.registry.renew(worker) == Renewed(True, 0)
    await put(brief, worker, added(prompt(3)))
    assert 3 * SHORT_TTL_MS < await broker.call("PTTL", held) <= 4 * SHORT_TTL_MS
    await broker.call("PEXPIRE", held, 500)
    assert await brief.registry.renew(worker) == Renewed(True, 3)
    assert await broker.call("PTTL", held) > 3 * SHORT_TTL_MS
    # Who has lost its lease renews nothing.
    await broker.call("PEXPIRE", held, 500)
    assert await brief.registry.renew(replace(worker, incarnation="0" * 16)) == Renewed(False, 0)
    assert await broker.call("PTTL", held) <= 500

    async def expired() -> bool:
        return bool(await broker.call("EXISTS", held) == 0)

    await until(expired)
    assert await brief.registry.renew(worker) == Renewed(True, 0)


async def test_no_life_is_taken_for_another(brief: Stage, index: PrefixIndex, broker: Broker) -> None:
    """After a crash and a restart under the same name, what the dead one held is nobody's."""
    dead, whole = await brief.worker(), prompt(3)
    await brief.running("r1", dead)
    await put(brief, dead, added(whole))
    await brief.perish(dead)
    risen = await brief.worker()
    seen = await index.match([risen], {"f": whole})
    assert seen["w0"].blocks == 0
    await put(brief, dead, added(whole))
    assert await blocks(index, risen, whole) == 0
    assert await brief.rehome(risen) == {"r1": Rehomed.MOVED}
    assert await brief.jobs.orphans() == []
    assert await broker.call("EXISTS", broker.keys.held("w0", dead.incarnation)) == 0


async def test_it_goes_with_a_dead_worker(brief: Stage, broker: Broker) -> None:
    worker = await brief.worker()
    await brief.running("r1", worker)
    await put(brief, worker, added(prompt(3)))
    await brief.perish(worker)
    # A server that has just started gives everybody time to come back.
    assert len(await until(brief.jobs.orphans)) == 1
    assert await brief.jobs.cancel("r1") is Finished.ENDED
    assert await brief.jobs.orphans() == []
    assert await broker.call("EXISTS", broker.keys.held("w0", worker.incarnation)) == 0


async def test_it_goes_with_a_worker_that_leaves(stage: Stage, broker: Broker) -> None:
    worker = await stage.worker()
    await stage.submit("r1", worker)
    await put(stage, worker, added(prompt(3)))
    # Not by the hand of another life.
    await stage.registry.leave("w0", "0" * 16)
    assert await broker.call("EXISTS", broker.keys.held("w0", worker.incarnation)) == 1
    await stage.registry.leave("w0", worker.incarnation)
    assert await broker.call("EXISTS", broker.keys.held("w0", worker.incarnation)) == 0


async def test_keys_of_another_type_hold_nothing_and_are_replaced(
    stage: Stage, index: PrefixIndex, broker: Broker
) -> None:
    worker, good = await stage.worker(), await stage.worker("w1")
    await put(stage, good, added(prompt(3)))
    held = broker.keys.held("w0", worker.incarnation)
    load = broker.keys.load("w0", worker.incarnation)
    await broker.call("SET", held, "x", "PX", 60_000)
    await broker.call("SET", load, "x", "PX", 60_000)
    seen = await index.match([worker, good], {"f": prompt(3)})
    assert seen == {"w0": Seen(0, Load()), "w1": Seen(3, Load())}
    assert await stage.registry.renew(worker) == Renewed(True, 0)
    await broker.call("SET", held, "x", "PX", 60_000)
    assert await put(stage, worker, added(prompt(2))) == Committed([], 2)
    await broker.call("DEL", load)


async def test_hashes_that_are_not_short_are_refused(stage: Stage, index: PrefixIndex) -> None:
    worker = await stage.worker()
    with pytest.raises(ValueError, match="16 bytes"):
        await put(stage, worker, HeldChange(added=(bytes(32),)))
    with pytest.raises(ValueError, match="16 bytes"):
        await index.replace("w0", worker.incarnation, [bytes(15)])
