"""Sends requests when they are due, whatever became of those before, and notes what their users would have seen."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from bench.routing_figures import ANSWERED, FAILED, REFUSED, UNANSWERED, Sample
from ops.client import Answer, BrokenStream, describe
from ops.tasks import cancel_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.routing_load import Ask
    from octavo.v1 import inference_pb2
    from ops.client import Client


_PAUSE_S = 0.2
_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Sent:
    """What a run was. Seconds, by this process's clocks."""

    samples: list[Sample]
    wall_s: float
    cpu_s: float
    """That this process took."""
    began_unix_s: float
    """By this machine's clock."""


@dataclass(slots=True, eq=False)
class _Call:
    """One request under way."""

    ask: Ask
    request: inference_pb2.GenerateRequest
    sent: float = 0.0
    """By the monotonic clock."""
    outcome: str = UNANSWERED
    error: str = ""
    answer: Answer = field(default_factory=Answer)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    ended: float | None = None

    async def run(self, client: Client, timeout: float) -> None:
        self.sent = time.monotonic()
        try:
            await client.generate(self.request, timeout=timeout, on_response=self._note, into=self.answer)
        except grpc.aio.AioRpcError as error:
            self.outcome = _OUTCOMES.get(error.code(), FAILED)
            self.error = describe(error)
        except BrokenStream as error:
            self.outcome, self.error = FAILED, f"broken stream: {error}"
        else:
            self.outcome = ANSWERED
        finally:
            self.ended = time.monotonic()

    def _note(self, response: inference_pb2.GenerateResponse, _: Answer) -> None:
        count = sum(len(chunk.token_ids) for chunk in response.chunks)
        if count:
            self.tokens.append((time.monotonic() - self.sent, count))

    def sample(self, began: float) -> Sample:
        """As its user saw it. It must have been sent and have ended."""
        assert self.ended is not None
        route, first = self.answer.route, self.answer.first_token_s
        return Sample(
            due_s=self.ask.due_s,
            lag_s=max(0.0, self.sent - began - self.ask.due_s),
            prompt_tokens=len(self.ask.prompt),
            outcome=self.outcome,
            waited_s=self.ended - self.sent,
            error=self.error,
            worker=route.worker if route is not None and first is not None else "",
            cached_tokens=route.cached_tokens if route is not None else 0,
            predicted_tokens=route.predicted_cached_tokens if route is not None else 0,
            first_token_s=first,
            tokens=tuple(self.tokens),
        )


_OUTCOMES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: REFUSED,
    grpc.StatusCode.DEADLINE_EXCEEDED: UNANSWERED,
}


async def send(client: Client, asks: Sequence[Ask], *, salt: str, seconds: float, drain_s: float) -> Sent:
    """An open loop: each request goes out at its moment. What has not ended `drain_s` after `seconds` is given up.

    Messages are made before the first is due: what is left to do at its moment is to send it.
    """
    calls = [_Call(ask, ask.request(salt)) for ask in asks]
    tasks: list[asyncio.Task[None]] = []
    cpu, began, began_unix_s = time.process_time(), time.monotonic(), time.time()
    try:
        for call in calls:
            await _until(began + call.ask.due_s)
            left = began + seconds + drain_s - time.monotonic()
            tasks.append(asyncio.create_task(call.run(client, max(left, 0.001))))
        await _until(began + seconds)
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s)
    finally:
        await cancel_all(tasks)
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    return Sent([call.sample(began) for call in calls], wall_s, cpu_s, began_unix_s)


@dataclass(frozen=True, slots=True)
class Saturated:
    """What a fleet did while it had enough to do."""

    ends: list[float]
    """When answers ended, in seconds since the beginning."""
    errors: Counter[str]
    """Calls that failed, by message."""


async def saturate(
    client: Client,
    asks: Iterator[Ask],
    *,
    salt: str,
    places: int,
    seconds: float,
    answers: int = 0,
    most_s: float = 0.0,
) -> Saturated:
    """A closed loop: `places` requests are always under way, for `seconds`, and longer, up to `most_s`, where so many
    `answers` have not come yet; then what is under way is given up."""
    began = time.monotonic()
    ends: list[float] = []
    errors: Counter[str] = Counter()
    enough = asyncio.Event()

    async def user() -> None:
        for ask in asks:
            try:
                await client.generate(ask.request(salt), timeout=max(seconds, most_s) + _MARGIN_S)
            except grpc.aio.AioRpcError as error:
                errors[describe(error)] += 1
                # Who is refused at once would do nothing but ask.
                await asyncio.sleep(_PAUSE_S)
            except BrokenStream as error:
                errors[f"broken stream: {error}"] += 1
            else:
                ends.append(time.monotonic() - began)
                if len(ends) >= answers:
                    enough.set()

    users = [asyncio.create_task(user()) for _ in range(places)]
    try:
        _, busy = await asyncio.wait(users, timeout=seconds)
        if busy and len(ends) < answers and most_s > seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(began + most_s - time.monotonic()):
                    await enough.wait()
    finally:
        await cancel_all(users)
    return Saturated(ends, errors)


def rate_of(ends: Sequence[float], places: int) -> float:
    """Answers per second of a closed loop. What ends first counts, as many as there are places, only where nothing else
    did: a fleet begins all of it together, and ends nothing for a while."""
    if len(ends) <= places:
        return len(ends) / ends[-1] if ends else 0.0
    return (len(ends) - places) / (ends[-1] - ends[places - 1])


async def _until(moment: float) -> None:
    """Gives way to others at least once, however late it is."""
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
