"""What arrivals have around them, under the hands of a test."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from kvstore.errors import BrokerUnreachable
from kvstore.jobs import Claim
from kvstore.page import names_of
from kvstore.structure import StructureRefused
from octavo.v1 import inference_pb2, job_pb2
from tests.unit.worker.page_store import BS, ROOT
from worker.arrivals import Arrivals
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

    async def prepare(self, names: list[PageName], request_id: str) -> int:
        assert names
        await self.come.wait()
        return len(names)


class ScriptedGrammars:
    """Makes of a regular expression itself, once the test lets it; three of them are not compiled."""

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
        if structure.regex == "late":
            raise TimeoutError("too late")
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
