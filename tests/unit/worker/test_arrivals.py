"""Claims on their way to the engine: at once, after their pages or their logs, unless they have ended by then."""

from __future__ import annotations

import asyncio

import pytest

from kvstore import outage
from kvstore.errors import BrokerAuth
from octavo.v1 import job_pb2
from tests.unit.worker.arrivals_world import World
from tests.unit.worker.page_store import BS
from worker import arrivals
from worker.arrivals import NOT_YET, REFUSED, UNREADABLE


async def test_who_lacks_nothing_begins_at_once() -> None:
    for world in (World(), World(pages=False)):
        world.take("a", BS - 1)
        assert world.stepper.told == ["add a"]
        assert world.journal.running["a"].since == 1
        assert not world.arrivals._preparing


async def test_who_lacks_pages_begins_after_them_and_holds_up_nobody() -> None:
    world = World()
    world.take("a", BS)
    world.take("b", 1)
    assert world.stepper.told == ["add b"]
    assert world.journal.running["a"].since == NOT_YET
    await world.bring()
    assert world.stepper.told == ["add b", "add a"]
    assert world.journal.running["a"].since == 2
    assert world.journal.running["a"].fetched_tokens == 1


async def test_who_has_ended_meanwhile_does_not_begin() -> None:
    world = World()
    world.take("a", BS)
    world.journal.drop("a")
    await world.bring()
    assert world.stepper.told == []


async def test_a_new_attempt_takes_the_place_of_one_that_waits_for_its_pages() -> None:
    world = World()
    world.take("a", BS)
    world.take("a", BS)  # the same claim again, after a lost reply
    world.take("a", BS, attempt=2)
    assert world.stepper.told == ["abort a"]
    await world.bring()
    assert world.stepper.told == ["abort a", "add a"]
    assert world.journal.running["a"].claim.attempt == 2
    assert world.journal.running["a"].since == 2


# Those that go on


async def test_who_has_said_something_goes_on_after_its_log() -> None:
    world = World(pages=False)
    world.log("a", [7, 8], [9])
    world.readable.clear()
    world.take("a", 3, attempt=2, past=(2, 1, 0), ended={1})
    world.take("b", 1)
    assert world.stepper.told == ["add b"]
    assert world.journal.running["a"].since == NOT_YET
    world.readable.set()
    await world.prepared()
    assert world.stepper.told == ["add b", "add a after {0: (7, 8), 1: (9,), 2: ()}, [1]"]
    assert world.journal.running["a"].since == 2
    assert world.journal.running["a"].next_index == [2, 1, 0]
    assert world.went_on == ["attempt"]


async def test_a_choice_that_has_ended_with_its_first_token_is_a_past_too() -> None:
    world = World(pages=False)
    world.log("a", [], [9])
    world.take("a", 3, attempt=2, past=(0, 1), ended={1})
    await world.prepared()
    assert world.stepper.told == ["add a after {0: (), 1: (9,)}, [1]"]


async def test_a_later_attempt_at_what_has_said_nothing_begins() -> None:
    world = World(pages=False)
    world.take("a", 3, attempt=2, past=(0, 0))
    assert world.stepper.told == ["add a"]
    assert world.went_on == []


@pytest.mark.parametrize(("prompt_logprobs", "said"), [(None, (2, 3)), (1, (1, 3))])
async def test_pages_are_fetched_for_what_was_said_too(prompt_logprobs: int | None, said: tuple[int, int]) -> None:
    """Once the prompt's log-probabilities are told, nothing of it must be computed."""
    world = World()
    world.log("a", range(said[0]), range(50, 50 + said[1]))
    world.take("a", BS, attempt=2, past=said, prompt_logprobs=prompt_logprobs)
    await asyncio.sleep(0)
    assert world.stepper.told == []
    await world.bring()
    assert world.pages.asked == [(*range(BS), 50, 51, 52)]
    assert len(world.stepper.told) == 1


async def test_an_outage_delays_who_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "RETRY_S", 0.0)
    world = World(pages=False)
    world.log("a", [7])
    world.outages = 3
    world.take("a", 3, attempt=2, past=(1,))
    await world.prepared()
    assert world.stepper.told == ["add a after {0: (7,)}, []"]


async def test_a_log_that_may_not_be_read_for_long_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrivals, "RETRY_S", 0.0)
    monkeypatch.setattr(outage, "REFUSED_S", 0.05)
    world = World(pages=False)
    world.log("a", [7])
    world.outages, world.outage = 10**9, BrokerAuth("secret-host: NOPERM")
    world.take("a", 3, attempt=2, past=(1,))
    async with asyncio.timeout(5):
        await world.prepared()
    assert [(each.failure, each.chunk.error) for each in world.failed] == [(job_pb2.FAILURE_UNAVAILABLE, REFUSED)]
    assert "job a ended, as its log may not be read: secret-host: NOPERM" in caplog.text


async def test_who_has_ended_while_its_log_is_read_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "RETRY_S", 0.0)
    for outages in (0, 10**9):
        world = World(pages=False)
        world.log("a", [7])
        world.outages = outages
        world.take("a", 3, attempt=2, past=(1,))
        world.readable.clear()
        await asyncio.sleep(0)
        world.journal.drop("a")
        world.readable.set()
        await world.prepared()
        assert (world.stepper.told, world.failed) == ([], [])


async def test_a_log_that_lacks_something_ends_the_job() -> None:
    world = World(pages=False)
    world.log("a", [7], [])
    world.take("a", 3, attempt=2, past=(1, 1))
    await world.prepared()
    assert world.stepper.told == []
    assert [(each.chunk.choice, each.chunk.start, each.failure, each.chunk.error) for each in world.failed] == [
        (choice, 1, job_pb2.FAILURE_UNAVAILABLE, "the broker lost a part of this job's output") for choice in (0, 1)
    ]
    assert world.journal.running == {}


async def test_a_fault_of_ours_ends_the_job_and_nothing_else() -> None:
    world = World(pages=False)
    world.take("a", 3, attempt=2, past=(1,))
    await world.prepared()
    assert [(each.failure, each.chunk.error) for each in world.failed] == [(job_pb2.FAILURE_INTERNAL, UNREADABLE)]
