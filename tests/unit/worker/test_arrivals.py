"""Claims on their way to the engine: at once, after their pages or their logs, unless they have ended by then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from kvstore import outage
from kvstore.errors import BrokerAuth, BrokerUnreachable
from kvstore.jobs import Claim
from kvstore.page import names_of
from kvstore.structure import StructureRefused
from octavo.v1 import inference_pb2, job_pb2
from tests.unit.worker.page_store import BS, ROOT
from worker import arrivals
from worker.arrivals import NOT_YET, REFUSED, UNREADABLE, Arrivals
from worker.journal import Journal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from kvstore.page import PageName
    from worker.grammar import Grammars
    from worker.matching import Grammar
    from worker.pages import Pages
    from worker.sequence import Request
    from worker.stepper import Stepper

ENTRY = "1-0"


class ScriptedStepper:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @property
    def posted(self) -> int:
        return len(self.told)

    def add(
        self, request: Request, said: Mapping[int, Sequence[int]] | None = None, ended: Collection[int] = ()
    ) -> None:
        past = "" if said is None else f" after {dict(said)}, {sorted(ended)}"
        form = "" if request.grammar is None else f" as {request.grammar}"
        self.told.append(f"add {request.request_id}{form}{past}")

    def abort(self, request_id: str) -> None:
        self.told.append(f"abort {request_id}")


class ScriptedPages:
    """Lacks all blocks of a prompt, and brings them when the test says so."""

    def __init__(self) -> None:
        self.come = asyncio.Event()
        self.asked: list[tuple[int, ...]] = []

    def lacking(self, request: Request) -> list[PageName]:
        self.asked.append(request.prompt)
        return [] if request.prompt_logprobs is not None else names_of(ROOT, request.prompt, BS)

    async def prepare(self, names: list[PageName]) -> int:
        assert names
        await self.come.wait()
        return len(names)


class ScriptedGrammars:
    """Makes of a regular expression itself, once the test lets it; two of them can't be compiled."""

    def __init__(self) -> None:
        self.come = asyncio.Event()
        self.come.set()
        self.closed = False

    async def compile(self, structure: inference_pb2.Structure) -> Grammar:
        await self.come.wait()
        if structure.regex == "(":
            raise StructureRefused("no end")
        if structure.regex == "fault":
            raise RuntimeError(structure.regex)
        return cast("Grammar", structure.regex)

    def close(self) -> None:
        self.closed = True


class World:
    def __init__(self, *, pages: bool = True) -> None:
        self.journal = Journal("w0")
        self.stepper = ScriptedStepper()
        self.pages = ScriptedPages()
        self.grammars = ScriptedGrammars()
        given = cast("Pages", self.pages) if pages else None
        self.logs: dict[str, list[job_pb2.Delivery]] = {}
        self.outages = 0
        """Reads that fail, after their first page, before one works."""
        self.outage: Exception = BrokerUnreachable("away")
        self.readable = asyncio.Event()
        self.readable.set()
        self.failed: list[job_pb2.Delivery] = []
        self.went_on: list[str] = []
        self.reading = self.most_reading = 0
        """Logs that are read just now, and the most that ever were."""
        self.given_again: list[tuple[str, str]] = []
        self.arrivals = Arrivals(
            *(self.journal, cast("Stepper", self.stepper), given, cast("Grammars", self.grammars)),
            *(self._read, self._hand_over, self.went_on.append, self._give_again),
        )

    async def _read(self, request_id: str) -> AsyncIterator[list[job_pb2.Delivery]]:
        """In pages of two."""
        self.reading += 1
        self.most_reading = max(self.most_reading, self.reading)
        try:
            await self.readable.wait()
            log = self.logs[request_id]
            for at in range(0, len(log), 2):
                yield log[at : at + 2]
                if self.outages:
                    self.outages -= 1
                    raise self.outage
        finally:
            self.reading -= 1

    def _give_again(self, request_id: str, entry: str) -> None:
        self.given_again.append((request_id, entry))

    async def _hand_over(self, deliveries: list[job_pb2.Delivery]) -> None:
        self.failed += deliveries

    def take(
        self,
        request_id: str,
        tokens: int,
        attempt: int = 1,
        past: tuple[int, ...] = (),
        ended: Collection[int] = (),
        prompt_logprobs: int | None = None,
        regex: str = "",
    ) -> None:
        job = job_pb2.Job(request_id=request_id, prompt_token_ids=range(tokens), n=max(len(past), 1))
        if regex:
            job.structure.regex = regex
        if prompt_logprobs is not None:
            job.prompt_logprobs = prompt_logprobs
        self.arrivals.take(Claim(job, attempt, None, 0, "g", ENTRY, past, frozenset(ended)), now=0.0)

    def log(self, request_id: str, *choices: Sequence[int]) -> None:
        """A log in which each choice has said these tokens, one by one."""
        chunks = [
            inference_pb2.Chunk(choice=choice, start=start, token_ids=[token])
            for choice, said in enumerate(choices)
            for start, token in enumerate(said)
        ]
        self.logs[request_id] = [job_pb2.Delivery(request_id=request_id, attempt=1, chunk=chunk) for chunk in chunks]

    async def prepared(self) -> None:
        while tasks := self.arrivals._preparing:
            await asyncio.gather(*tasks)

    async def bring(self) -> None:
        self.pages.come.set()
        await self.prepared()


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
