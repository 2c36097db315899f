"""Readers of many streams at once, that do as little as can be until these are over."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import httptools

from bench.streams_figures import Told
from octavo.v1 import inference_pb2, inference_pb2_grpc
from ops.client import OPTIONS, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STREAMS_PER_CHANNEL: Final = 50
"""By gRPC: a connection has so many. By HTTP each has one of its own."""
END: Final = b"\r\n0\r\n\r\n"
"""Of a body in chunks."""


def request_of(request_id: str, prompt: str, tokens: int) -> inference_pb2.GenerateRequest:
    """Greedy, of exactly so many tokens."""
    request = inference_pb2.GenerateRequest(request_id=request_id, text=prompt)
    request.sampling.temperature = 0
    request.stopping.max_tokens, request.stopping.ignore_eos = tokens, True
    return request


class Load:
    """What the readers of one load share: `all_open` is set once each has something."""

    def __init__(self, count: int) -> None:
        self.told = [Told() for _ in range(count)]
        self.all_open = asyncio.Event()
        self.first_end = asyncio.Event()
        self._waiting = count

    def begun(self) -> None:
        """One has its first output."""
        self._waiting -= 1
        if not self._waiting:
            self.all_open.set()

    def ended(self) -> None:
        """One is over, well or not."""
        self.first_end.set()
        self.all_open.set()  # nobody is to wait for it in vain


async def by_grpc(target: str, requests: Sequence[inference_pb2.GenerateRequest], load: Load) -> None:
    """Reads one stream for each request."""
    async with AsyncExitStack() as stack:
        stubs: list[Any] = []
        for _ in range(-(-len(requests) // STREAMS_PER_CHANNEL)):
            # Else all channels to one address share a connection.
            options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target, options=options))
            stubs.append(inference_pb2_grpc.InferenceStub(channel))

        async def read(index: int) -> None:
            ids: list[int] = []
            told = load.told[index]
            told.output, told.sent = ids, time.time()
            try:
                async for response in stubs[index % len(stubs)].Generate(requests[index]):
                    if not ids:
                        load.begun()
                    for chunk in response.chunks:
                        ids.extend(chunk.token_ids)
                    told.arrivals.append((time.time(), len(ids)))
            except grpc.aio.AioRpcError as error:
                told.error = describe(error)
            finally:
                load.ended()

        await asyncio.gather(*map(read, range(len(requests))))


async def by_http(address: str, requests: Sequence[inference_pb2.GenerateRequest], load: Load) -> None:
    """The same, as events of OpenAI's API. What has come is taken apart once all is there."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()

    async def read(index: int) -> list[tuple[float, bytes]]:
        told = load.told[index]
        told.sent = time.time()
        try:
            _, reader = await loop.create_connection(lambda: _Reader(requests[index], load.begun), host, int(port))
            await reader.over
        except OSError as error:
            told.error = type(error).__name__
            return []
        finally:
            load.ended()
        return reader.parts

    parts = await asyncio.gather(*map(read, range(len(requests))))
    for told, each in zip(load.told, parts, strict=True):
        if not told.error:
            take_apart(each, told)


class _Reader(asyncio.Protocol):
    """One connection: notes what comes, and when."""

    def __init__(self, request: inference_pb2.GenerateRequest, begun: Callable[[], None]) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.over = asyncio.get_running_loop().create_future()
        self._request = request
        self._begun = begun

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        request = self._request
        fields = {
            "prompt": request.text,
            "max_tokens": request.stopping.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"x-request-id: {request.request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        if not self.parts:
            self._begun()
        self.parts.append((time.time(), data))
        if data.endswith(END):
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


class _Body:
    """What a parser calls."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.whole = False

    def on_body(self, body: bytes) -> None:
        self.data += body

    def on_message_complete(self) -> None:
        self.whole = True


def take_apart(parts: Sequence[tuple[float, bytes]], told: Told) -> None:
    """From the bytes of one response, with their times, to text and arrivals."""
    body = _Body()
    parser = httptools.HttpResponseParser(body)
    text, ended = "", False
    for moment, data in parts:
        parser.feed_data(data)
        *events, rest = bytes(body.data).split(b"\n\n")
        body.data = bytearray(rest)
        before = len(text)
        for event in events:
            if event == b"data: [DONE]":
                ended = True
                continue
            value = json.loads(event.removeprefix(b"data: "))
            text += "".join(choice["text"] for choice in value.get("choices", ()))
        if len(text) > before:
            told.arrivals.append((moment, len(text)))
    told.output = text
    if not (body.whole and ended):
        status = parser.get_status_code() if parts else 0
        told.error = f"status {status}, and no whole answer" if status != 200 else "no end"
