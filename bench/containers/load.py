"""What is asked of the fleet, and whether each answer is the one that its request has alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.client import Client
from octavo.v1.inference_pb2 import FinishReason, GenerateRequest, Sampling, Stopping

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = 160
PROMPTS = (
    "A book is",
    "The sea at night",
    "Once upon a time",
    "To bake bread, first",
    "The first printers",
    "Mountains are",
    "In the library",
    "She opened the letter and",
)


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finishes: list[int] = field(default_factory=list)
    worker: str = ""
    """Where it began."""
    attempts: int = 0

    @property
    def whole(self) -> bool:
        return self.finishes == [FinishReason.LENGTH] and len(self.tokens) == TOKENS


class Progress:
    """Tokens of all streams, and who waits for how many."""

    def __init__(self) -> None:
        self.tokens = 0
        self._waiting: list[tuple[int, asyncio.Event]] = []

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        for wanted, event in self._waiting:
            if self.tokens >= wanted:
                event.set()

    async def reaches(self, tokens: int) -> None:
        event = asyncio.Event()
        self._waiting.append((tokens, event))
        await event.wait()


def requests(prefix: str) -> list[GenerateRequest]:
    """Half of them greedy, half drawn."""
    return [
        GenerateRequest(
            request_id=f"{prefix}-{index}",
            text=prompt,
            sampling=Sampling(temperature=0.8 * (index % 2), seed=index),
            stopping=Stopping(max_tokens=TOKENS, ignore_eos=True),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


async def answer(client: Client, request: GenerateRequest, into: Answer, progress: Progress) -> Answer:
    """Raises what the client raises."""
    async for response in client.generate(request, timeout=300):
        if response.HasField("route"):
            into.worker = into.worker or response.route.worker
        if response.HasField("usage"):
            into.attempts = response.usage.attempts
        for chunk in response.chunks:
            if chunk.start != len(into.tokens):
                raise ValueError(f"{request.request_id}: token {chunk.start} follows {len(into.tokens)} tokens")
            into.tokens += chunk.token_ids
            into.text += chunk.text
            if chunk.finish:
                into.finishes.append(chunk.finish)
            progress.add(len(chunk.token_ids))
    return into


async def alone(targets: Sequence[str], run: str) -> list[Answer]:
    """Each request by itself."""
    async with Client(targets) as client:
        return [await answer(client, each, Answer(), Progress()) for each in requests(f"{run}-alone")]


def faults(results: Sequence[Answer | BaseException], expected: Sequence[Answer]) -> list[str]:
    """What is not as it was promised, a line each."""
    found = []
    for index, result in enumerate(results):
        wanted = expected[index % len(expected)]
        if isinstance(result, BaseException):
            found.append(f"stream {index}: lost: {result}")
        elif not result.whole:
            found.append(f"stream {index}: {len(result.tokens)} tokens, ends {result.finishes}")
        elif (result.tokens, result.text) != (wanted.tokens, wanted.text):
            found.append(f"stream {index}: other tokens than alone")
    return found
