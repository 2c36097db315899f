"""Claims of jobs whose answers have a form: they wait until it is compiled, and end when it can't be."""

from __future__ import annotations

import asyncio

import pytest

from octavo.v1 import job_pb2
from tests.unit.worker.arrivals_world import World
from tests.unit.worker.page_store import BS
from worker.arrivals import NOT_YET, UNCOMPILED


async def test_who_wants_a_form_begins_once_it_is_compiled_and_holds_up_nobody() -> None:
    world = World()
    world.grammars.come.clear()
    world.take("a", 1, regex="x+")
    world.take("b", 1)
    await asyncio.sleep(0)
    assert world.stepper.told == ["add b"]
    assert world.journal.running["a"].since == NOT_YET
    world.grammars.come.set()
    await world.prepared()
    assert world.stepper.told == ["add b", "add a as x+"]


async def test_a_form_and_pages_and_a_past_come_together() -> None:
    world = World()
    world.take("a", BS, regex="x+")
    await world.bring()
    world.log("b", [7])
    world.take("b", BS, attempt=2, past=(1,), regex="y")
    await world.bring()
    assert world.stepper.told == ["add a as x+", "add b as y after {0: (7,)}, []"]
    assert world.journal.running["a"].fetched_tokens == 1


@pytest.mark.parametrize("past", [(0, 0), (1, 0)])
async def test_what_cannot_be_compiled_ends_its_job_and_nothing_else(past: tuple[int, ...]) -> None:
    world = World(pages=False)
    for name, regex in (("a", "("), ("b", "fault"), ("c", "x"), ("d", "late")):
        world.log(name, range(past[0]))
        world.take(name, 3, attempt=2, past=past, regex=regex)
    await world.prepared()
    expected = {
        "a": (job_pb2.FAILURE_INVALID, "structure: no end"),
        "b": (job_pb2.FAILURE_INTERNAL, UNCOMPILED),
        "d": (job_pb2.FAILURE_UNAVAILABLE, "structure: too late"),
    }
    ends = [(one.request_id, one.chunk.choice, one.failure, one.chunk.error) for one in world.failed]
    assert sorted(ends) == [(name, choice, *expected[name]) for name in expected for choice in (0, 1)]
    assert [told[:5] for told in world.stepper.told] == ["add c"]


async def test_who_has_ended_while_its_form_was_compiled_does_not_begin() -> None:
    for regex in ("x", "("):
        world = World(pages=False)
        world.grammars.come.clear()
        world.take("a", 3, regex=regex)
        await asyncio.sleep(0)
        world.journal.drop("a")
        world.grammars.come.set()
        await world.prepared()
        assert (world.stepper.told, world.failed) == ([], [])


async def test_closing_gives_what_is_on_its_way() -> None:
    world = World(pages=False)
    world.grammars.come.clear()
    world.take("a", 3, regex="x")
    tasks = world.arrivals.close()
    assert len(tasks) == 1
    assert world.grammars.closed
    world.grammars.come.set()
    await world.prepared()
