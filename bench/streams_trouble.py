"""Clients that a gateway must bear: bodies of 20 MB, malformed ones, and clients that leave in the middle.

A process of its own, as these are busy: `python -m bench.streams_trouble GRPC HTTP PAUSE`. It begins with the first
line on stdin, ends with stdin, and prints what each kind was answered, and how often.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HUGE: Final = 20_000_000
LEFT: Final = "left"
ANSWER_S: Final = 30.0
TOKENS: Final = 400
"""Of an answer that is left: more than anybody waits for."""
EXPECTED: Final = {
    "20 MB by HTTP": "413",
    "20 MB by HTTP in parts": "413",
    "broken JSON": "400",
    "no HTTP": "400",
    "half a body": LEFT,
    "HTTP stream cut off": LEFT,
    "20 MB by gRPC": "RESOURCE_EXHAUSTED",
    "5 MB by gRPC": "INVALID_ARGUMENT",
    "no message": "INVALID_ARGUMENT",
    "no gRPC": LEFT,
    "gRPC stream cut off": LEFT,
}
"""What each kind is to be answered."""
GENERATE: Final = "/octavo.v1.Inference/Generate"
UNLIMITED: Final = (("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0))


class Trouble:
    """Each method makes trouble once, and returns what it was answered."""

    def __init__(self, target: str, http: str) -> None:
        """HOST:PORT each."""
        self._target, self._http = target, http

    def kinds(self) -> dict[str, Callable[[], Awaitable[str]]]:
        """As ``EXPECTED``."""
        ways = (
            *(self.huge, self.huge_in_parts, self.broken, self.no_http, self.half, self.cut),
            *(self.huge_message, self.large_message, self.no_message, self.no_grpc, self.cut_call),
        )
        return dict(zip(EXPECTED, ways, strict=True))

    async def huge(self) -> str:
        """A body of 20 MB, announced."""
        return await self._post(b'{"prompt": "' + b"a" * HUGE + b'"}')

    async def huge_in_parts(self) -> str:
        """The same without a length."""
        part = b"a" * 2**16
        body = b"%x\r\n%s\r\n" % (len(part), part) * (HUGE // len(part)) + b"0\r\n\r\n"
        return await self._post(body, length="transfer-encoding: chunked")

    async def broken(self) -> str:
        """No JSON."""
        return await self._post(b'{"prompt": "a", ')

    async def no_http(self) -> str:
        """What speaks TLS, say."""
        return await self._send(self._http, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")

    async def half(self) -> str:
        """A body whose second half does not come."""
        await self._post(b'{"prompt": "a', length="content-length: 1000", wait=False)
        return LEFT

    async def cut(self) -> str:
        """A stream whose reader goes without a word."""
        body = {"prompt": "abc", "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        return await self._post(json.dumps(body).encode(), leave=True)

    async def huge_message(self) -> str:
        """20 MB, which gRPC refuses."""
        return await self._call(inference_pb2.GenerateRequest(text="a" * HUGE).SerializeToString())

    async def large_message(self) -> str:
        """5 MB, which gRPC takes."""
        return await self._call(inference_pb2.GenerateRequest(text="a" * 5_000_000).SerializeToString())

    async def no_message(self) -> str:
        """Bytes that are no request."""
        return await self._call(b"\xff" * 64)

    async def no_grpc(self) -> str:
        """Bytes that are no HTTP/2: the gateway says so in its own way, or hangs up."""
        await self._send(self._target, b"GET / HTTP/1.1\r\n\r\n" * 100)
        return LEFT

    async def cut_call(self) -> str:
        """A call that is cancelled after its first response."""
        request = inference_pb2.GenerateRequest(text="abc")
        request.stopping.max_tokens, request.stopping.ignore_eos = TOKENS, True
        return await self._call(request.SerializeToString(), leave=True)

    async def _post(self, body: bytes, *, length: str | None = None, wait: bool = True, leave: bool = False) -> str:
        how = length or f"content-length: {len(body)}"
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{how}\r\n\r\n"
        return await self._send(self._http, head.encode() + body, wait=wait, leave=leave)

    async def _send(self, address: str, data: bytes, *, wait: bool = True, leave: bool = False) -> str:
        """The status of what comes back; `leave`: the connection is reset after the first event."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            await writer.drain()
            if leave:
                await reader.readuntil(b"data: ")
                return LEFT
            line = await reader.readline() if wait else b""
            return line.split(b" ")[1].decode("latin-1") if line.count(b" ") > 1 else LEFT
        finally:
            writer.transport.abort()

    async def _call(self, data: bytes, *, leave: bool = False) -> str:
        async with grpc.aio.insecure_channel(self._target, options=UNLIMITED) as channel:
            method: Any = channel.unary_stream(GENERATE)
            call = method(data, timeout=ANSWER_S)
            try:
                async for _ in call:
                    if leave:
                        return LEFT
            except grpc.aio.AioRpcError as error:
                return error.code().name
            finally:
                call.cancel()
        return "OK"


async def make_trouble(trouble: Trouble, pause: float, over: asyncio.Event) -> dict[str, Counter[str]]:
    """All kinds in turn, a pause between two, until `over`; each once in any case, so that all answers are known."""
    answers: dict[str, Counter[str]] = {kind: Counter() for kind in EXPECTED}
    kinds = trouble.kinds()
    while not over.is_set() or not all(answers.values()):
        for kind, make in kinds.items():
            try:
                async with asyncio.timeout(ANSWER_S):
                    answers[kind][await make()] += 1
            except (OSError, EOFError, TimeoutError) as error:
                answers[kind][type(error).__name__] += 1
            if over.is_set() and all(answers.values()):
                break
            await asyncio.sleep(pause)
    return answers


async def main(target: str, http: str, pause: str) -> None:
    """The process."""
    over, trouble = asyncio.Event(), Trouble(target, http)
    if not await asyncio.to_thread(sys.stdin.readline):
        return

    async def listen() -> None:
        await asyncio.to_thread(sys.stdin.read)
        over.set()

    listening = asyncio.create_task(listen())
    answers = await make_trouble(trouble, float(pause), over)
    await listening
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
