"""A call's way to its client, by HTTP: what ``gateway.rpc.Context`` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from gateway.http.problems import aborted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import grpc

    from octavo.v1 import inference_pb2

    Metadata = Sequence[tuple[str, str]]
    Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class HttpContext:
    """One call. Who leaves has its task cancelled, as by gRPC."""

    def __init__(self, metadata: Metadata, write: Write | None = None, *, chat: bool = False) -> None:
        """``metadata``: the HTTP request's headers, names in lower case. ``write``: takes the responses of a call that
        streams. ``chat``: failures are told in the words of chat completions."""
        self._metadata = tuple(metadata)
        self._write = write
        self._chat = chat

    async def write(self, message: Any, /) -> None:
        """Returns once the client has room for it."""
        assert self._write is not None, "a unary call returns its response"
        await self._write(message)

    async def send_initial_metadata(self, _metadata: Any, /) -> None:
        """The id of the request goes into the answer's head, which waits for the first output: a failure before that
        has a status of its own."""

    def invocation_metadata(self) -> Metadata:
        """The HTTP request's headers."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """HTTP has no deadlines: a client that stops waiting closes its connection."""
        return None

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = (), /) -> NoReturn:
        """Raises Failed."""
        raise aborted(code, details, trailing_metadata, chat=self._chat)
