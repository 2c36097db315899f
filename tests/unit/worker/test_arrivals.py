"""Claims on their way to the engine: at once, or after their pages, unless they have ended by then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from kvstore.jobs import Claim
from kvstore.page import names_of
from octavo.v1 import job_pb2
from tests.unit.worker.page_store import BS, ROOT
from worker.arrivals import NOT_YET, Arrivals
from worker.journal import Journal

if TYPE_CHECKING:
    from kvstore.page import PageName
    from worker.pages import Pages
    from worker.sequence import Request
    from worker.stepper import Stepper


class ScriptedStepper:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @property
    def posted(self) -> int:
        return len(self.told)

    def add(self, request: Request) -> None:
        self.told.append(f"add {request.request_id}")

    def abort(self, request_id: str) -> None:
        self.told.append(f"abort {request_id}")


class ScriptedPages:
    """Lacks all blocks of a prompt, and brings them when the test says so."""

    def __init__(self) -> None:
        self.come = asyncio.Event()

    def lacking(self, request: Request) -> list[PageName]:
        return names_of(ROOT, request.prompt, BS)

    async def prepare(self, names: list[PageName]) -> None:
        assert names
        await self.come.wait()


class World:
    def __init__(self, *, pages: bool = True) -> None:
        self.journal = Journal("w0")
        self.stepper = ScriptedStepper()
        self.pages = ScriptedPages()
        given = cast("Pages", self.pages) if pages else None
        self.arrivals = Arrivals(self.journal, cast("Stepper", self.stepper), given)

    def take(self, request_id: str, tokens: int, attempt: int = 1) -> None:
        job = job_pb2.Job(request_id=request_id, prompt_token_ids=range(tokens))
        self.arrivals.take(Claim(job, attempt, None, 0, "g", f"{attempt}-0"), now=0.0)

    async def bring(self) -> None:
        self.pages.come.set()
        await asyncio.gather(*self.arrivals.preparing)


async def test_who_lacks_nothing_begins_at_once() -> None:
    for world in (World(), World(pages=False)):
        world.take("a", BS - 1)
        assert world.stepper.told == ["add a"]
        assert world.journal.running["a"].since == 1
        assert not world.arrivals.preparing


async def test_who_lacks_pages_begins_after_them_and_holds_up_nobody() -> None:
    world = World()
    world.take("a", BS)
    world.take("b", 1)
    assert world.stepper.told == ["add b"]
    assert world.journal.running["a"].since == NOT_YET
    await world.bring()
    assert world.stepper.told == ["add b", "add a"]
    assert world.journal.running["a"].since == 2


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
