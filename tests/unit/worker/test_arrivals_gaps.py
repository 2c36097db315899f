"""Jobs that go on from their logs: what is read at a time, what is tried again, and what ends them."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import BrokerAuth, BrokerError, BrokerFull, BrokerUnreachable
from octavo.v1 import job_pb2
from tests.unit.worker.arrivals_world import ENTRY, World
from worker import arrivals
from worker.arrivals import NOT_YET, READERS
from worker.journal import MAX_ROLLBACKS
from worker.past import RolledBack


@pytest.mark.parametrize("outage", [BrokerUnreachable("away"), BrokerFull("full"), BrokerAuth("WRONGPASS")])
async def test_a_read_that_fails_on_its_way_is_begun_anew(monkeypatch: pytest.MonkeyPatch, outage: Exception) -> None:
    monkeypatch.setattr(arrivals, "RETRY_S", 0.0)
    world = World(pages=False)
    world.log("a", [7, 8, 9, 10, 11])
    world.outages, world.outage = 3, outage
    world.take("a", 3, attempt=2, past=(5,))
    await world.prepared()
    assert world.outages == 0
    assert world.stepper.told == ["add a after {0: (7, 8, 9, 10, 11)}, []"]


async def test_what_does_not_pass_ends_the_job() -> None:
    """Its log is of another type, say: however often it is read. Where the broker is, callers are not told."""
    world = World(pages=False)
    world.log("a", [7])
    world.outages, world.outage = 10**9, BrokerError("broker at redis://10.0.0.7:6379: WRONGTYPE")
    world.take("a", 3, attempt=2, past=(1,))
    await world.prepared()
    assert world.stepper.told == []
    assert [(each.failure, each.chunk.error) for each in world.failed] == [
        (job_pb2.FAILURE_INTERNAL, "the worker could not go on from what this job has said; what it logs tells why")
    ]
    assert world.journal.running == {}


async def test_few_logs_are_read_at_a_time() -> None:
    """After an outage all jobs may have to go on."""
    world = World(pages=False)
    names = [f"r{number}" for number in range(3 * READERS)]
    world.readable.clear()
    for name in names:
        world.log(name, [7])
        world.take(name, 3, attempt=2, past=(1,))
    for _ in range(3):
        await asyncio.sleep(0)
    assert world.reading == READERS
    world.readable.set()
    await world.prepared()
    assert world.most_reading == READERS
    assert sorted(world.stepper.told) == sorted(f"add {name} after {{0: (7,)}}, []" for name in names)


async def test_a_job_with_a_gap_goes_on_from_what_is_left() -> None:
    world = World(pages=False)
    world.take("a", 3, past=(0, 0))
    job = world.journal.running["a"]
    job.next_index = [5, 4]
    world.log("a", [7, 8], [9])
    assert world.arrivals.roll_back("a", 1, ENTRY, {0: 2}) is RolledBack.GOES_ON
    assert world.journal.running["a"].since == NOT_YET
    await world.prepared()
    assert world.stepper.told == ["add a", "abort a", "add a after {0: (7, 8), 1: (9,)}, []"]
    assert world.journal.running["a"].next_index == [2, 1]
    assert world.went_on == ["gap"]


async def test_a_second_gap_takes_the_place_of_the_first() -> None:
    world = World(pages=False)
    world.take("a", 3)
    world.log("a", [7])
    world.readable.clear()
    assert world.arrivals.roll_back("a", 1, ENTRY, {0: 1}) is RolledBack.GOES_ON
    await asyncio.sleep(0)
    assert world.arrivals.roll_back("a", 1, ENTRY, {0: 0}) is RolledBack.GOES_ON
    world.log("a", [])
    world.readable.set()
    await world.prepared()
    assert world.stepper.told == ["add a", "abort a", "abort a", "add a after {0: ()}, []"]


async def test_who_is_not_ours_or_was_rolled_back_too_often_is_not() -> None:
    world = World(pages=False)
    assert world.arrivals.roll_back("a", 1, ENTRY, {0: 0}) is RolledBack.NOT_OURS
    world.take("a", 3)
    world.log("a", [])
    assert world.arrivals.roll_back("a", 2, ENTRY, {0: 0}) is RolledBack.NOT_OURS
    assert world.arrivals.roll_back("a", 1, "0-1", {0: 0}) is RolledBack.NOT_OURS  # submitted anew meanwhile
    rolled = [world.arrivals.roll_back("a", 1, ENTRY, {0: 0}) for _ in range(MAX_ROLLBACKS + 1)]
    assert rolled == [RolledBack.GOES_ON] * MAX_ROLLBACKS + [RolledBack.TOO_OFTEN]
    await world.prepared()
    assert world.given_again == [("a", ENTRY), ("a", ENTRY), ("a", "0-1")]


async def test_a_job_that_is_ending_may_have_been_rolled_back_too_often() -> None:
    world = World(pages=False)
    world.take("a", 3)
    world.journal.running["a"].rollbacks = MAX_ROLLBACKS
    world.journal.fail("a", job_pb2.FAILURE_DEADLINE, "late")
    assert world.arrivals.roll_back("a", 1, ENTRY, {0: 0}) is RolledBack.TOO_OFTEN
    assert world.given_again == []


async def test_a_job_that_was_left_to_others_is_not_ours() -> None:
    world = World(pages=False)
    world.take("a", 3)
    world.journal.drop("a")
    assert world.arrivals.roll_back("a", 1, ENTRY, {0: 0}) is RolledBack.NOT_OURS
    assert world.journal.running == {}
    assert world.stepper.told == ["add a"]
