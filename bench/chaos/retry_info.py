"""How long a refused client is told to wait: google.rpc.RetryInfo in a status, or plain metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DETAILS: Final = "grpc-status-details-bin"
PLAIN: Final = ("retry-after-ms", "grpc-retry-pushback-ms")
"""The same in plain metadata, for clients that read no details."""
RETRY_INFO: Final = "type.googleapis.com/google.rpc.RetryInfo"


def retry_after_ms(metadata: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """Of trailing metadata: of the details, or else of what stands there plainly. None when nothing was told, or
    nothing that can be read."""
    plain = None
    for name, value in metadata or ():
        if name == DETAILS and isinstance(value, bytes):
            for detail in _fields(value, 3):
                if (told := _delay_of(detail)) is not None:
                    return told
        elif name in PLAIN and isinstance(value, str) and value.isascii() and value.isdigit():
            plain = int(value) if plain is None else plain
    return plain


def _delay_of(detail: bytes) -> int | None:
    try:
        message = AnyMessage.FromString(detail)
        if message.type_url != RETRY_INFO:
            return None
        delays = [Duration.FromString(field) for field in _fields(message.value, 1)]
    except DecodeError:
        return None
    return delays[0].ToMilliseconds() if delays else None


def _fields(data: bytes, wanted: int) -> Iterator[bytes]:
    """Payloads of the length-delimited fields of that number. google.rpc's messages have varints besides."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7 == 2:
            if key >> 3 == wanted:
                yield data[at : at + value]
            at += value
        elif key & 7 != 0:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    return value, at
