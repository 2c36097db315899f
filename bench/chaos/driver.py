"""Clients: they send requests at a rate to a list of gateways, go on elsewhere when a call breaks, and record it all.

A client knows what a user's client knows: a call that ends with UNAVAILABLE and without a terminal chunk was cut off,
and its request may go on. Any gateway goes on with it, from the first token that the client lacks (Attach); where none
knows it, because it was never accepted or the broker has lost it, it is sent again under its id. Terminal chunks are
the end, whatever they say. RESOURCE_EXHAUSTED is asked for again after a while.

Some of a load is asked for by the product's own client instead, see ``product``: it has to do all this by itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc
import grpc.aio

from bench.chaos.history import ATTACH, BAD, CANCEL, GENERATE, LOAD, PROBE, Called, Came, Ended, Invoked, Recorder
from bench.chaos.product import Asked, Product
from bench.chaos.records import brought, ended_by
from octavo.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from bench.chaos.traffic import Payload

AGAIN: Final = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
PAUSE_S: Final = (0.05, 1.0)
"""Between two calls of a request: the first pause, and the longest. Each is drawn from half of it to all of it."""
HANGS_S: Final = 6.0
"""So long after a call's deadline it hangs, and is left open in the history."""
OPTIONS: Final = [
    ("grpc.enable_http_proxy", 0),
    # A gateway that comes back is found at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class GoOn(Protocol):
    """How a request is gone on with. ``have``: by choice, how many tokens the client has. Returns the verb for the
    history, the indexes that are asked for from, and the call."""

    def __call__(
        self, stub: Any, request: inference_pb2.GenerateRequest, have: Mapping[int, int], timeout: float
    ) -> tuple[str, dict[int, int], Any]: ...


def by_replay(
    stub: Any, request: inference_pb2.GenerateRequest, have: Mapping[int, int], timeout: float
) -> tuple[str, dict[int, int], Any]:
    """The same request again: all of its output comes anew."""
    del have
    return GENERATE, {}, stub.Generate(request, timeout=timeout)


def by_attach(
    stub: Any, request: inference_pb2.GenerateRequest, have: Mapping[int, int], timeout: float
) -> tuple[str, dict[int, int], Any]:
    """What the client lacks; with nothing yet, the request again."""
    if not have:
        return by_replay(stub, request, have, timeout)
    asked = inference_pb2.AttachRequest(request_id=request.request_id, after=have)
    return ATTACH, dict(have), stub.Attach(asked, timeout=timeout)


@dataclass(frozen=True, slots=True)
class Habits:
    """How clients behave."""

    rate: float = 4.0
    """Requests per second, at random times."""
    deadline_s: float = 60.0
    cancels: float = 0.05
    """Share of requests that are cancelled after some tokens."""
    bad: float = 0.05
    """Share of requests that are to be refused."""
    go_on: GoOn = by_attach
    merged_every: int = 3
    """One in so many requests of a load is the product's client's, see ``product``; 0: none."""


@dataclass(slots=True)
class _Progress:
    """One request's life at its client."""

    payload: Payload
    request: inference_pb2.GenerateRequest
    until: float
    calls: int = 0
    have: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    unknown: bool = False
    """The last gateway that was asked to go on knew nothing of it."""
    cancel_at: int | None = None
    """Tokens after which it is cancelled."""
    cancelling: asyncio.Task[None] | None = None


class Driver:
    """``prefix`` begins every request id: two drivers of one fleet need two. An async context manager."""

    def __init__(
        self, targets: Sequence[str], recorder: Recorder, *, seed: int, habits: Habits | None = None, prefix: str = "r"
    ) -> None:
        self.recorder = recorder
        self.habits = habits or Habits()
        self._targets = list(targets)
        self._numbers = random.Random(f"driver/{seed}")
        self._prefix = prefix
        self._sent = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, Any] = {}
        self._product: Product | None = None

    async def __aenter__(self) -> Driver:
        for target in self._targets:
            self._channels[target] = grpc.aio.insecure_channel(target, options=OPTIONS)
            stub: Any = inference_pb2_grpc.InferenceStub(self._channels[target])
            self._stubs[target] = stub
        self._product = Product(self._targets, self.recorder, self._numbers, hangs_s=HANGS_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._product is not None:
            await self._product.close()
        for channel in self._channels.values():
            await channel.close()

    async def load(self, payloads: Sequence[Payload], bad: Sequence[Payload], seconds: float) -> None:
        """Sends some of them at the rate, some by the product's client; returns when all have ended."""
        numbers, habits, sent = self._numbers, self.habits, 0
        ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while (pause := numbers.expovariate(habits.rate)) < ends - time.monotonic():
                await asyncio.sleep(pause)
                sent += 1
                merged = bool(habits.merged_every) and sent % habits.merged_every == 0
                send = self.send_merged if merged else self.send
                if bad and numbers.random() < habits.bad:
                    group.create_task(send(numbers.choice(bad), role=BAD))
                else:
                    cancelled = numbers.random() < habits.cancels
                    cancel_at = numbers.randint(1, 10) if cancelled else None
                    group.create_task(send(numbers.choice(payloads), cancel_at=cancel_at))

    async def ask_each(self, payloads: Sequence[Payload], *, at_once: int = 8) -> None:
        """Sends each of them once, some at a time; returns when all have ended: for the run without faults."""
        slots = asyncio.Semaphore(at_once)

        async def one(payload: Payload) -> None:
            async with slots:
                await self.send(payload)

        async with asyncio.TaskGroup() as group:
            for payload in payloads:
                group.create_task(one(payload))

    async def probe(self, payloads: Sequence[Payload]) -> None:
        """Sends one to every gateway: each must serve by now."""
        async with asyncio.TaskGroup() as group:
            for index, target in enumerate(self._targets):
                group.create_task(self.send(payloads[index % len(payloads)], role=PROBE, first=target))

    async def send(
        self, payload: Payload, *, role: str = LOAD, cancel_at: int | None = None, first: str | None = None
    ) -> str:
        """One request to its end; its id. ``cancel_at``: after so many tokens. ``first``: the gateway to begin with."""
        request, until = self._begin(payload, role)
        progress = _Progress(payload, request, until, cancel_at=cancel_at)
        target = first or self._numbers.choice(self._targets)
        pause = PAUSE_S[0]
        while True:
            ended = await self._call(progress, target)
            if ended is None or len(progress.ended) == payload.n:
                break
            if ended.status not in AGAIN and not progress.unknown:
                break
            told = (ended.retry_after_ms or 0) / 1000
            wait = max(told, pause * self._numbers.uniform(0.5, 1.0))
            if time.monotonic() + wait >= progress.until:
                break
            await asyncio.sleep(wait)
            pause = min(2 * pause, PAUSE_S[1])
            target = self._other_than(target)
        if progress.cancelling is not None:
            await progress.cancelling
        return request.request_id

    async def send_merged(self, payload: Payload, *, role: str = LOAD, cancel_at: int | None = None) -> str:
        """One request to its end, by the product's client; its id. ``cancel_at``: after so many tokens it is cancelled,
        or left."""
        assert self._product is not None, "an async context manager, entered"
        request, until = self._begin(payload, role)
        leaves = cancel_at is not None and self._numbers.random() < 0.5
        await self._product.ask(Asked(request, until, cancel_at, leaves))
        return request.request_id

    def _begin(self, payload: Payload, role: str) -> tuple[inference_pb2.GenerateRequest, float]:
        """A request under an id of its own, and its deadline."""
        request_id = f"{self._prefix}{self._sent}"
        self._sent += 1
        now, deadline_s = time.monotonic(), self.habits.deadline_s
        told = (request_id, now, payload.digest, payload.kind, payload.n)
        self.recorder.note(Invoked(*told, role=role, deadline_s=deadline_s, expect=payload.expect))
        return payload.named(request_id), now + deadline_s

    def _other_than(self, target: str) -> str:
        return self._numbers.choice([one for one in self._targets if one != target] or [target])

    async def _call(self, progress: _Progress, target: str) -> Ended | None:
        """One call and its record; None when it hangs."""
        number, left = progress.calls, progress.until - time.monotonic()
        progress.calls += 1
        request_id = progress.request.request_id
        go_on = by_replay if progress.unknown else self.habits.go_on
        verb, after, call = go_on(self._stubs[target], progress.request, progress.have, left)
        self.recorder.note(Called(request_id, number, time.monotonic(), verb, target, after))
        # What a replay brings again is counted again.
        progress.have = dict(after)
        ended: Ended | None = None
        try:
            async with asyncio.timeout(left + HANGS_S):
                async for response in call:
                    self._take(progress, number, response)
                ended = Ended(request_id, number, time.monotonic(), "OK")
        except grpc.aio.AioRpcError as error:
            ended = ended_by(request_id, number, error)
        except TimeoutError:
            call.cancel()
        if ended is not None:
            self.recorder.note(ended)
            progress.unknown = verb == ATTACH and ended.status == "NOT_FOUND"
        return ended

    def _take(self, progress: _Progress, number: int, response: inference_pb2.GenerateResponse) -> None:
        for event in brought(progress.request.request_id, number, response):
            self.recorder.note(event)
            if isinstance(event, Came):
                have = progress.have.get(event.choice, 0)
                progress.have[event.choice] = max(have, event.start + len(event.tokens))
                if event.finish:
                    progress.ended.add(event.choice)
        if progress.cancel_at is not None and sum(progress.have.values()) >= progress.cancel_at:
            progress.cancel_at = None
            progress.cancelling = asyncio.create_task(self._cancel(progress))

    async def _cancel(self, progress: _Progress) -> None:
        """Until a gateway has answered, or the request's time is over."""
        request = inference_pb2.CancelRequest(request_id=progress.request.request_id)
        target = self._numbers.choice(self._targets)
        while (left := progress.until - time.monotonic()) > 0:
            number, progress.calls = progress.calls, progress.calls + 1
            self.recorder.note(Called(request.request_id, number, time.monotonic(), CANCEL, target))
            try:
                response = await self._stubs[target].Cancel(request, timeout=min(left, 10.0))
            except grpc.aio.AioRpcError as error:
                self.recorder.note(ended_by(request.request_id, number, error))
            else:
                cancelled = bool(response.cancelled)
                self.recorder.note(Ended(request.request_id, number, time.monotonic(), "OK", cancelled=cancelled))
                return
            await asyncio.sleep(PAUSE_S[0])
            target = self._other_than(target)
