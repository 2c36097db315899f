"""A client that does not lose its answer: where one gateway fails it, it goes on at the next.

::

    async with Client(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        async for response in client.generate(request, timeout=60):
            ...                                 # each token once, one end for each choice, whatever died meanwhile

It needs grpc, octavo.v1, ``gateway.access``, ``gateway.asking`` and ``gateway.merged``, nothing else of Octavo: take
the four files along.
A job goes on in the fleet while its gateway is gone, so the client attaches to it from the first token that it lacks.
Where nobody knows the job any more (the broker lost it), or it was ended because its caller seemed to have left (its
gateway lives, and saw the connection break), it is asked for again: it has the same tokens, and those that have come
are left out. Should a worker of another kind give others, the answer is not patched together: it ends with
BrokenStream.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from gateway.access import OPEN, Access, keyed, open_channel
from gateway.asking import Asking, Attaching, cut_off, failed, new_caller, prepared, retry_after
from gateway.merged import BrokenStream
from octavo.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from types import TracebackType

__all__ = ["Access", "BrokenStream", "Client", "cut_off", "prepared", "retry_after"]

PATIENCE_S: Final = 60.0
"""How long a request is asked for again after a failure, while nothing new comes."""
CANCEL_S: Final = 2.0
"""How long a gateway may take to cancel a request. Of one that stands still nothing else tells sooner."""
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
    has taken yet (None: `patience_s`). The job of a request that is given up ends, unless somebody else has asked for
    it since: `on_farewell` hears its id, and whether a gateway could be told, before ``close`` returns. `on_trouble`
    hears the last error once every gateway has failed in a row, when it begins to wait for them. `access`
    says how they are reached: by TLS, with an API key; by default in plaintext, without one.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        patience_s: float = PATIENCE_S,
        accept_s: float | None = None,
        on_farewell: Callable[[str, bool], None] | None = None,
        on_trouble: Callable[[grpc.aio.AioRpcError], None] | None = None,
        access: Access = OPEN,
    ) -> None:
        if not targets:
            raise ValueError("a client needs at least one gateway")
        self._patience_s = patience_s
        self._accept_s = patience_s if accept_s is None else accept_s
        self._on_farewell = on_farewell
        self._on_trouble = on_trouble
        self._channels = [open_channel(target, access, OPTIONS) for target in targets]
        # The generated stubs are untyped: their calls are typed here.
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceStub(keyed(each, access)) for each in self._channels]
        self._at = 0
        self._running: list[Asking] = []
        self._farewells: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections, and with them the calls that are open, once what was given up is cancelled."""
        if self._farewells:
            await asyncio.wait(self._farewells)
        for channel in self._channels:
            await channel.close()

    def generate(
        self, request: inference_pb2.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The answer to a request: of each choice all tokens once, in order, and one end; at last the usage.

        `timeout` seconds hold for all of it. A request without an id gets one, and one that draws without a seed gets
        one that follows from its id, so that whoever asks for the same again means the same. Leaving early, being
        cancelled, and giving up end the job, unless it is detached or somebody else has asked for it since.

        Raises:
            grpc.aio.AioRpcError: as the service says; the last error, where patience was in vain.
            BrokenStream: a gateway broke the service's promises.
        """
        asked = prepared(request)
        asked.caller = new_caller()
        return self._follow(Asking(asked, len(self._stubs), timeout))

    def attach(
        self, request_id: str, *, after: Mapping[int, int] | None = None, watch: bool = False
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The output of a job that was asked for before, of each choice from its token `after` on (0, where none is
        given), as ``generate`` has it; `choices`, in the first response, says how many there are.

        Leaving ends the job as with ``generate``, unless it is detached, or the caller only looks on (`watch`).

        Raises:
            grpc.aio.AioRpcError: as ``generate``; NOT_FOUND where no such job is known, or it was lost.
            BrokenStream: as ``generate``.
        """
        return self._follow(Attaching(request_id, after or {}, len(self._stubs), watch=watch))

    async def _follow(self, asking: Asking) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        detached = asking.request.detached
        self._running.append(asking)
        call: Any = None
        try:
            while True:
                asking.check()
                gateway = self._at
                call = asking.call(self._stubs[gateway])
                try:
                    await call.initial_metadata()
                    if asking.dropped:
                        # Whoever was told to cancel it may not have known it yet.
                        await self._cancel_open(asking.request.request_id)
                    async for response in call:
                        if (news := asking.take(response)) is not None:
                            yield news
                    if asking.ended():
                        return
                    pause = 0.0
                except grpc.aio.AioRpcError as error:
                    call.cancel()  # it is open still where it could not be cancelled
                    if asking.merged.over and not asking.merged.failed:
                        return  # all has come but the status
                    pause = asking.after(error, self._patience_s, self._accept_s)
                    if self._on_trouble is not None and pause and asking.failures == len(self._stubs):
                        self._on_trouble(error)
                if pause and self._at == gateway:
                    self._at = (gateway + 1) % len(self._stubs)
                await asyncio.sleep(pause)
        except (GeneratorExit, asyncio.CancelledError):
            if call is not None and call.done() and not call.cancelled() and not detached:
                await self._tell_of_leaving(asking.request)
            raise
        except grpc.aio.AioRpcError:
            if asking.given_up and not detached:
                self._bid_farewell(asking)
            raise
        finally:
            self._running.remove(asking)
            if call is not None:
                call.cancel()

    async def cancel(self, request_id: str) -> bool:
        """Ends a job, by the first gateway that answers, each in turn. True when this call ended a live one. A
        ``generate`` of this client that runs under that id makes no job of it any more; one that is on its way to a
        gateway ends as soon as it is accepted.

        Raises:
            grpc.aio.AioRpcError: as the last gateway says.
        """
        dropped = [asking for asking in self._running if asking.named == request_id]
        for asking in dropped:
            asking.dropped = True
        ids = {asking.request.request_id for asking in dropped} or {request_id}
        ended = [await self._cancel(each) for each in sorted(ids)]
        return any(ended)

    async def _cancel_open(self, request_id: str) -> None:
        """Where no gateway can be told, the call's own end has to do: what went wrong is no news of the job."""
        try:
            await self._cancel(request_id)
        except grpc.aio.AioRpcError as error:
            raise failed(grpc.StatusCode.CANCELLED, "the request was cancelled") from error

    async def _cancel(self, request_id: str) -> bool:
        for turn in range(1, len(self._stubs) + 1):
            gateway = self._at
            try:
                return await self._cancel_at(gateway, inference_pb2.CancelRequest(request_id=request_id))
            except grpc.aio.AioRpcError as error:
                if turn == len(self._stubs) or error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise  # else it is the gateway's trouble: a job can be cancelled any number of times
            if self._at == gateway:
                self._at = (gateway + 1) % len(self._stubs)
        raise AssertionError("there is at least one gateway")

    async def _cancel_at(self, gateway: int, request: inference_pb2.CancelRequest) -> bool:
        response = await self._stubs[gateway].Cancel(request, timeout=CANCEL_S)
        return bool(response.cancelled)

    async def _tell_of_leaving(self, asked: inference_pb2.GenerateRequest) -> bool:
        """The caller of a job leaves while no call of it is open: no gateway sees that. All are told at once, as nobody
        is to wait for one that stands still. Whether one has answered."""
        leaving = inference_pb2.CancelRequest(request_id=asked.request_id, caller=asked.caller)
        telling = [asyncio.create_task(self._cancel_at(each, leaving)) for each in range(len(self._stubs))]
        try:
            for first in asyncio.as_completed(telling):
                with suppress(grpc.aio.AioRpcError):
                    await first
                    return True
            return False
        finally:
            for each in telling:
                each.cancel()
            await asyncio.gather(*telling, return_exceptions=True)

    def _bid_farewell(self, asking: Asking) -> None:
        """Beside the caller, who is not to wait for it any longer."""
        task = asyncio.create_task(self._part(asking), name=f"cancel {asking.named}")
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _part(self, asking: Asking) -> None:
        told = await self._tell_of_leaving(asking.request)
        if self._on_farewell is not None:
            self._on_farewell(asking.named, told)
