"""A client that does not lose its answer: where one gateway fails it, it goes on at the next.

::

    async with Client(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        async for response in client.generate(request, timeout=60):
            ...                                 # each token once, one end for each choice, whatever died meanwhile

It needs grpc, octavo.v1 and ``gateway.merged``, nothing else of Octavo: take both files along. A job goes on in the
fleet while its gateway is gone, so the client attaches to it from the first token that it lacks. Where nobody knows the
job any more (the broker lost it), or its gateway lives and cancelled it because the connection broke, it is asked for
again: it has the same tokens, and those that have come are left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from gateway.merged import BrokenStream, Merged
from octavo.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType

__all__ = ["BrokenStream", "Client", "cut_off", "prepared"]

PATIENCE_S: Final = 60.0
"""How long a request is asked for again after a failure, while nothing new comes."""
PAUSE_S: Final = (0.05, 1.0)
"""Before the next call: the first pause, and the longest. Each is drawn from half of it to all of it."""
SEVERED_S: Final = 5.0
"""A job that ends with CANCELLED so soon after its connection broke was cancelled by the gateway there, which took that
for its caller's leaving."""
CANCEL_S: Final = 2.0
"""How long it is tried to tell a fleet that a request is cancelled."""
GREEDY: Final = 1e-5
"""Temperatures below it draw nothing."""
ACCEPTED: Final = "octavo-request-id"
"""Initial metadata of a call whose request the fleet has taken."""
RETRY_AFTER: Final = "retry-after-ms"
"""Trailing metadata of a call that may be tried again after so long."""
OPTIONS: Final = (
    # A proxy in the environment is for the outside, never on the way to a gateway.
    ("grpc.enable_http_proxy", 0),
    # A gateway that comes back is found at once; one that can't be reached is given up soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),
    # A gateway that stands still, or whose machine is gone, closes no connection: pings find out.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of pings that measure the way; while one is out, no other is sent
    ("grpc.http2.max_pings_without_data", 0),
)


class Client:
    """Calls one fleet through any of its gateways; an async context manager, made where an event loop runs.

    `targets`, HOST:PORT each, are tried in this order, beginning with the one that answered last: who has many clients
    shuffles them. A request is given up, with its last error, when every gateway has failed in a row and nothing new
    has come for `patience_s` since the first of these failures. `accept_s` is the same for a request that no gateway
    has taken yet (None: `patience_s`).
    """

    def __init__(
        self, targets: Sequence[str], *, patience_s: float = PATIENCE_S, accept_s: float | None = None
    ) -> None:
        if not targets:
            raise ValueError("a client needs at least one gateway")
        self._patience_s = patience_s
        self._accept_s = patience_s if accept_s is None else accept_s
        self._channels = [grpc.aio.insecure_channel(target, options=OPTIONS) for target in targets]
        # The generated stubs are untyped: their calls are typed here.
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._at = 0

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections, and with them the calls that are open."""
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, request: inference_pb2.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The answer to a request: of each choice all tokens once, in order, and one end; at last the usage.

        `timeout` seconds hold for all of it. A request without an id gets one, and one that draws without a seed gets
        one that follows from its id, so that whoever asks for the same again means the same. Leaving early, or being
        cancelled, cancels the job, unless it is detached.

        Raises:
            grpc.aio.AioRpcError: as the service says; the last error, where patience was in vain.
            BrokenStream: a gateway broke the service's promises.
        """
        asking = _Asking(prepared(request), len(self._stubs), timeout)
        call: Any = None
        try:
            while True:
                gateway = self._at
                call = asking.call(self._stubs[gateway])
                try:
                    async for response in call:
                        if (news := asking.take(response)) is not None:
                            yield news
                    if asking.ended():
                        return
                    pause = 0.0
                except grpc.aio.AioRpcError as error:
                    if asking.merged.over and not asking.merged.failed:
                        return  # all has come but the status
                    pause = asking.after(error, self._patience_s, self._accept_s)
                if pause and self._at == gateway:
                    self._at = (gateway + 1) % len(self._stubs)
                await asyncio.sleep(pause)
        except (GeneratorExit, asyncio.CancelledError):
            if call is not None and call.done() and not call.cancelled() and not request.detached:
                await self._tell_of_leaving(asking.request.request_id)
            raise
        finally:
            if call is not None:
                call.cancel()

    async def cancel(self, request_id: str) -> bool:
        """Ends a job, by the first gateway that answers. True when this call ended a live one.

        Raises:
            grpc.aio.AioRpcError: as the last gateway says.
        """
        request = inference_pb2.CancelRequest(request_id=request_id)
        for turn in range(1, len(self._stubs) + 1):
            gateway = self._at
            try:
                response = await self._stubs[gateway].Cancel(request, timeout=CANCEL_S)
                return bool(response.cancelled)
            except grpc.aio.AioRpcError as error:
                if turn == len(self._stubs) or not cut_off(error):
                    raise
            if self._at == gateway:
                self._at = (gateway + 1) % len(self._stubs)
        raise AssertionError("there is at least one gateway")

    async def _tell_of_leaving(self, request_id: str) -> None:
        """The caller of a job leaves while no call of it is open: no gateway sees that."""
        with suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self.cancel(request_id)


class _Asking:
    """One request on its way through gateways: what is asked for next, and when."""

    def __init__(self, request: inference_pb2.GenerateRequest, gateways: int, timeout: float | None) -> None:
        self.request = request
        self.merged = Merged(max(request.n, 1))
        self.failures = 0
        """In a row, with nothing new between them."""
        self._gateways = gateways
        self._until = None if timeout is None else time.monotonic() + timeout
        self._taken = False
        """A gateway has taken it."""
        self._known = False
        """The same, and none has said since that nobody knows it."""
        self._attaching = False
        self._failed_at = 0.0
        self._severed_at = float("-inf")
        self._cancelled = False
        self._named = request.request_id

    def call(self, stub: Any) -> Any:
        """The next call."""
        timeout = None if self._until is None else max(self._until - time.monotonic(), 0.001)
        self._attaching = self._known
        self.merged.begin(replay=not self._attaching)
        if not self._attaching:
            return stub.Generate(self.request, timeout=timeout)
        attach = inference_pb2.AttachRequest(request_id=self.request.request_id, after=self.merged.have)
        return stub.Attach(attach, timeout=timeout)

    def take(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        """What is new in a response; None: nothing. Raises BrokenStream."""
        self._known = self._taken = True
        news = self.merged.take(self._uncancelled(response))
        if news is not None:
            self.failures = 0
            news.request_id = self._named
        return news

    def _uncancelled(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        if time.monotonic() - self._severed_at > SEVERED_S:
            return response
        if all(chunk.finish != inference_pb2.CANCELLED for chunk in response.chunks):
            return response
        self._cancelled = True
        rest = inference_pb2.GenerateResponse(request_id=response.request_id)
        rest.chunks.extend(chunk for chunk in response.chunks if chunk.finish != inference_pb2.CANCELLED)
        return rest

    def ended(self) -> bool:
        """Whether a call that ended well was the last one. If not, the job was cancelled unasked: the same request
        becomes another job. Raises BrokenStream."""
        if not self._cancelled:
            self.merged.check_end()
        elif not self.merged.over:
            self.request.request_id = uuid.uuid4().hex
            self._known = self._cancelled = False
        return self.merged.over

    def after(self, error: grpc.aio.AioRpcError, patience_s: float, accept_s: float) -> float:
        """Seconds until the next call, after one that failed. Raises the error where there is none."""
        code, wait = error.code(), retry_after(error)
        if any(key == ACCEPTED for key, _ in error.initial_metadata() or ()):
            self._known = self._taken = True
        if code is grpc.StatusCode.NOT_FOUND and self._attaching:
            self._known = False
            return 0.0
        busy = code is grpc.StatusCode.RESOURCE_EXHAUSTED and wait is not None
        # Whoever took it served its model: that will be known again.
        forgotten = code is grpc.StatusCode.NOT_FOUND and self._taken
        if self.merged.over or not (busy or forgotten or cut_off(error)):
            raise error
        now = time.monotonic()
        if wait is None:  # a gateway that says something says how long to wait
            self._severed_at = now
        self._failed_at = self._failed_at if self.failures else now
        self.failures += 1
        pause = self._pause(wait or 0.0, busy=busy)
        patience = patience_s if self._taken else accept_s
        tired = self.failures >= self._gateways and now + pause > self._failed_at + patience
        if tired or (self._until is not None and now + pause >= self._until):
            raise error
        return pause

    def _pause(self, told: float, *, busy: bool) -> float:
        first, longest = PAUSE_S
        rounds = (self.failures - 1) // self._gateways
        pause = min(first * 2.0 ** min(rounds, 16), longest) * random.uniform(0.5, 1)
        # What one gateway says of itself does not hold for the others, unless it is full: they fill the same queues.
        if busy or self.failures % self._gateways == 0:
            pause = max(pause, told * random.uniform(1, 1.2))
        return pause


def prepared(request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    """The request with an id and, where it draws, a seed: whoever runs it, and however often, gives the same tokens."""
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(request)
    asked.request_id = asked.request_id or uuid.uuid4().hex
    greedy = asked.sampling.HasField("temperature") and asked.sampling.temperature < GREEDY
    if not greedy and not asked.sampling.HasField("seed"):
        digest = hashlib.sha256(asked.request_id.encode()).digest()
        asked.sampling.seed = int.from_bytes(digest[:8], "big")
    return asked


def cut_off(error: grpc.aio.AioRpcError) -> bool:
    """Whether it tells of the way to a gateway, or of what is behind it, and not of the request."""
    if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED):
        # The library's words for a connection that broke in the middle of a call.
        return any(words in (error.details() or "") for words in ("RST_STREAM", "Stream removed"))
    return error.code() is grpc.StatusCode.UNAVAILABLE


def retry_after(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds that a gateway asks to wait for; None: it does not say."""
    told = next((value for key, value in error.trailing_metadata() or () if key == RETRY_AFTER), "")
    try:
        return max(int(told), 0) / 1000
    except ValueError:
        return None
