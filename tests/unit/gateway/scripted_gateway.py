"""A gateway that does what a test says, on a real socket: for tests of clients."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from gateway.client import Client
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.v1.inference_pb2 import Chunk, FinishReason, GenerateResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    Context = grpc.aio.ServicerContext[Any, Any]

ID = "r1"


@dataclass(frozen=True)
class Fail:
    """Ends the call with this status."""

    code: grpc.StatusCode
    details: str = "because"
    trailing: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Accept:
    """Says that the request was taken, before there is any output."""


@dataclass(frozen=True)
class Hang:
    """Says nothing more until the call is over."""


@dataclass(frozen=True)
class Die:
    """Ends the gateway at once, as a killed process does: without a status."""


@dataclass(frozen=True)
class UntilCancelled:
    """Says nothing more until some job is cancelled here."""


Act = GenerateResponse | Fail | Accept | Hang | Die | UntilCancelled


@dataclass
class Called:
    """One call that a gateway got. `left`: the seconds that its deadline was away. The `request` is without the name of
    its `caller`, which no two have."""

    verb: str
    request: Any
    left: float | None
    caller: str


class Gateway(inference_pb2_grpc.InferenceServicer):
    """`calls` has what it was asked; `script` what it does at each of them, the last of it for ever."""

    def __init__(self, *script: list[Act]) -> None:
        self.calls: list[Called] = []
        self.cancelled: list[str] = []
        self.leavers: list[str] = []
        """Of each job that was cancelled: whose it was to be; empty: anybody's."""
        self.hanging = asyncio.Event()
        self.left = asyncio.Event()
        """The caller of a call that hung is gone."""
        self.cancelling = asyncio.Event()
        self.at_cancel: Fail | Hang | None = None
        """What it does when it is told to cancel a job; None: it says yes."""
        self.port = 0
        self._script = deque(script)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._ending: asyncio.Task[None] | None = None
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def verbs(self) -> list[str]:
        return [each.verb for each in self.calls]

    async def start(self, port: int = 0) -> None:
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._ending is not None:
            await self._ending
        await self._server.stop(None)

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        async for response in self._act("Generate", request, context):
            yield response

    async def Attach(  # noqa: N802
        self, request: inference_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        async for response in self._act("Attach", request, context):
            yield response

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        self.cancelled.append(request.request_id)
        self.leavers.append(request.caller)
        self.cancelling.set()
        match self.at_cancel:
            case Fail(code, details, trailing):
                await context.abort(code, details, trailing)
            case Hang():
                await asyncio.Event().wait()
        return inference_pb2.CancelResponse(cancelled=True)

    async def _act(self, verb: str, request: Any, context: Context) -> AsyncIterator[GenerateResponse]:
        caller = request.caller
        request.ClearField("caller")
        self.calls.append(Called(verb, request, context.time_remaining(), caller))
        for act in self._script.popleft() if len(self._script) > 1 else self._script[0]:
            match act:
                case GenerateResponse():
                    yield act
                case Fail(code, details, trailing):
                    await context.abort(code, details, trailing)
                case Accept():
                    await context.send_initial_metadata((("octavo-request-id", ID),))
                case Die():
                    self._ending = asyncio.create_task(self._server.stop(None))
                    await self._hang()
                case Hang():
                    await self._hang()
                case UntilCancelled():
                    self.hanging.set()
                    await self.cancelling.wait()

    async def _hang(self) -> None:
        self.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


@dataclass
class Fleet:
    """Gateways that run."""

    gateways: list[Gateway] = field(default_factory=list)

    @property
    def targets(self) -> list[str]:
        return [each.target for each in self.gateways]

    @property
    def verbs(self) -> list[list[str]]:
        return [each.verbs for each in self.gateways]


@asynccontextmanager
async def running(*scripts: list[list[Act]]) -> AsyncIterator[Fleet]:
    """A gateway for each script."""
    fleet = Fleet([Gateway(*script) for script in scripts])
    for gateway in fleet.gateways:
        await gateway.start()
    try:
        yield fleet
    finally:
        for gateway in fleet.gateways:
            await gateway.stop()


def said(
    start: int, *ids: int, text: str = "", finish: FinishReason | None = None, choice: int = 0, **fields: Any
) -> GenerateResponse:
    """A response of one chunk."""
    chunk = Chunk(choice=choice, start=start, token_ids=ids, text=text, finish=finish, **fields)
    return GenerateResponse(request_id=ID, chunks=[chunk])


def ended(
    start: int, *ids: int, text: str = "", finish: FinishReason = inference_pb2.STOP, tokens: int = 0
) -> GenerateResponse:
    """The last response of an answer."""
    response = said(start, *ids, text=text, finish=finish)
    response.usage.completion_tokens = tokens or start + len(ids)
    response.usage.attempts = 1
    return response


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
REQUEST = inference_pb2.GenerateRequest(
    request_id=ID,
    text="p",
    sampling=inference_pb2.Sampling(temperature=0),
    stopping=inference_pb2.Stopping(max_tokens=4),
)
HALF: list[Act] = [said(0, 10, text="a"), said(1, 11, text="b")]
REST: list[Act] = [said(2, 12, text="c"), ended(3, 13, text="d")]
WHOLE = ([10, 11, 12, 13], "abcd", ["STOP"])
"""What `told` says of HALF and REST."""


async def heard(
    fleet: Fleet,
    request: inference_pb2.GenerateRequest = REQUEST,
    *,
    timeout: float | None = None,
    **settings: Any,
) -> list[GenerateResponse]:
    """All that comes of a request to a client with these settings."""
    async with Client(fleet.targets, **settings) as client:
        return [response async for response in client.generate(request, timeout=timeout)]


def told(responses: Sequence[GenerateResponse], choice: int = 0) -> tuple[list[int], str, list[str]]:
    """Tokens, text and ends of a choice; its chunks follow each other."""
    tokens: list[int] = []
    text, ends = "", []
    for chunk in (chunk for each in responses for chunk in each.chunks if chunk.choice == choice):
        assert chunk.start == len(tokens)
        tokens += chunk.token_ids
        text += chunk.text
        ends += [inference_pb2.FinishReason.Name(chunk.finish)] if chunk.finish else []
    return tokens, text, ends


async def error_of(fleet: Fleet, **settings: Any) -> grpc.aio.AioRpcError:
    """How the request fails."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await heard(fleet, **settings)
    return failed.value
