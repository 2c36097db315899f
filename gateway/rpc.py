"""The edge between gRPC and the services: parsing, and the one place where an exception becomes a status.

Methods are registered from the protocol's descriptors and get raw bytes, because gRPC's own handling of a message that
does not parse answers UNKNOWN with a Python error in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from gateway.config import MAX_REQUEST_BYTES
from gateway.errors import AdmissionError, Status, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.descriptor import ServiceDescriptor

    from gateway.auth import Caller, Doorman

Request = TypeVar("Request", bound=Message)

MAX_DETAILS: Final = 1024
"""Characters of a status message. It travels in a header, and clients refuse headers above 8 KiB."""


class Context(Protocol):
    """What a call's way to its client is for us: gRPC's, or that of a call that came by HTTP (``gateway.http``)."""

    async def write(self, message: Any, /) -> None:
        """Sends a response; waits while the client reads too slowly."""

    async def send_initial_metadata(self, metadata: Any, /) -> None:
        """Once, before the first response."""

    def invocation_metadata(self) -> Any:
        """Pairs of name, in lower case, and value."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it has none."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any, /) -> NoReturn:
        """Ends the call. Raises in any case."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service. `call(request, context, caller)`: a unary one returns its response, a streaming one writes
    its responses to the context and returns None."""

    request: type[Message]
    call: Callable[[Any, Context, Caller], Awaitable[Message | None]]
    operators: bool = False
    """It concerns the whole fleet, and is for operators."""


def service_handler(service: ServiceDescriptor, methods: dict[str, Method], doorman: Doorman) -> grpc.GenericRpcHandler:
    """What ``server.add_generic_rpc_handlers`` takes. Raises ValueError unless `methods` are those of the service."""
    if set(methods) != set(service.methods_by_name):
        raise ValueError(f"{service.full_name} has methods {sorted(service.methods_by_name)}, not {sorted(methods)}")
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in methods.items():
        streaming = service.methods_by_name[name].server_streaming
        make = grpc.unary_stream_rpc_method_handler if streaming else grpc.unary_unary_rpc_method_handler
        handlers[name] = make(guarded(method, doorman), response_serializer=_serialize)
    return _Door(grpc.method_handlers_generic_handler(service.full_name, handlers), doorman)


class _Door(grpc.GenericRpcHandler):
    """Handlers whose calls are looked at when their heads have come: the library reads a request of megabytes, or
    waits for it, before it calls a handler that takes one."""

    def __init__(self, handlers: grpc.GenericRpcHandler, doorman: Doorman) -> None:
        self._handlers = handlers
        self._doorman = doorman

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = self._handlers.service(handler_call_details)
        if found is None:
            return None
        try:
            self._doorman.caller(handler_call_details.invocation_metadata)
        except Exception as error:  # the library would tell the caller UNKNOWN
            status = status_of(error)

            async def refuse(_requests: Any, context: Any) -> None:
                await abort(context, status)

            return grpc.stream_stream_rpc_method_handler(refuse)  # whose requests are read when it asks for them
        return found


def guarded(method: Method, doorman: Doorman) -> Callable[[bytes, Context], Awaitable[Message | None]]:
    """The method as it is called from outside, with a request's bytes, by whom the doorman lets in: of others not even
    the request is looked at. A failure ends the call with its status."""

    async def handle(data: bytes, context: Context) -> Message | None:
        try:
            metadata = context.invocation_metadata()
            caller = doorman.operator(metadata) if method.operators else doorman.caller(metadata)
            return await method.call(parse(method.request, data), context, caller)
        except grpc.aio.BaseError:
            # The call itself is over (the client left while we wrote), so there is nobody to answer.
            raise
        except Exception as error:
            status = status_of(error)
        await abort(context, status)
        return None

    return handle


def parse(kind: type[Request], data: bytes) -> Request:
    """The message in `data`. Raises AdmissionError when there is none, or it is too long."""
    if len(data) > MAX_REQUEST_BYTES:
        limit = f"must be at most {MAX_REQUEST_BYTES} (4 MiB); send a shorter prompt"
        raise AdmissionError("request", f"{len(data)} bytes", limit)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise AdmissionError("request", f"{len(data)} bytes", f"must be a {kind.DESCRIPTOR.full_name}") from error


async def abort(context: Context, status: Status) -> None:
    """Ends the call with `status`; does not return."""
    message = status.message if len(status.message) <= MAX_DETAILS else status.message[: MAX_DETAILS - 3] + "..."
    trailing: tuple[tuple[str, bytes | str], ...] = ()
    if status.retry_after_ms is not None:
        # One for the retry policies of gRPC clients, one for people's own, one for those that read error details.
        wait = str(status.retry_after_ms)
        details = retry_details(status.code, message, status.retry_after_ms)
        trailing = (("grpc-retry-pushback-ms", wait), ("retry-after-ms", wait), ("grpc-status-details-bin", details))
    await context.abort(status.code, message, trailing)


def retry_details(code: grpc.StatusCode, message: str, retry_after_ms: int) -> bytes:
    """google.rpc.Status with one google.rpc.RetryInfo, which is what clients' retry policies read.

    Written by hand: three fields are no reason for a dependency.
    """
    delay = Duration()
    delay.FromMilliseconds(retry_after_ms)
    retry_info = _field(1, delay.SerializeToString())
    detail = AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo", value=retry_info)
    number: int = code.value[0]
    return bytes((1 << 3, number)) + _field(2, message.encode()) + _field(3, detail.SerializeToString())


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    size, length = len(payload), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes((number << 3 | 2,)) + bytes(length) + payload


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
