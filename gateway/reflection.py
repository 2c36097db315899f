"""gRPC reflection: tells the protocol to clients that have no stubs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

V1ALPHA: Final[str] = reflection.SERVICE_NAME
V1: Final = "grpc.reflection.v1.ServerReflection"
"""The same messages, by the name that newer clients ask for. grpcio-reflection has the older one alone."""


class Symbols:
    """The pool of descriptors, with the methods of services: protobuf's own does not find their files, and
    `grpcurl describe` asks for them."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 - a pool's
        """The descriptor of the file. Raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Has the server tell these services, and reflection itself."""
    servicer: Any = reflection.aio.ReflectionServicer((*services, V1ALPHA), Symbols(descriptor_pool.Default()))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in (V1ALPHA, V1)]
    )
